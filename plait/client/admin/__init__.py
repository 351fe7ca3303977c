"""The methods of ``client.admin``: subjects, groups, dead letters, parked keys, schedules and the cluster.

``Admin`` is made of one class per concern. ``plait.client.client``, ``plait.client.blocking`` and the command line use
it. The package may import the other parts of ``plait.client`` except ``app`` and ``consume``, and ``plait.model``; it
sends admin requests through ``plait.client.net`` and imports no server code.
"""
