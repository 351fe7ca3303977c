"""The commands that run a server in the foreground: ``plait serve``, ``plait broker`` and ``plait meta``.

``plait.cli.entry`` imports a module when its command runs; ``plait bench`` and tests use ``child_process``. May import
the broker, the server, meta and storage.
"""
