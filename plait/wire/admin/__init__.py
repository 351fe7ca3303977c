"""Admin requests: one ``Operation`` for each, with the struct of its arguments and the type of its result.

Each module has the operations of one concept. Clients and servers use the same structs; the broker and the meta service
make the replies. May import ``plait.wire.messages``, the model and the limits.
"""
