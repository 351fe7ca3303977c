"""The commands of ``plait spark``: archive, audit, history, replay, prepare.

``plait.cli.entry`` and ``commands`` import a module when its command runs. May import ``plait.spark`` and the client;
a module imports Spark itself only when a command needs it.
"""
