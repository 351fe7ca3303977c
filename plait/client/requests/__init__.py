"""Request-reply: a message whose sender waits for a reply, over one reply subject of the deployment.

``Requesting`` has the methods of the client, ``Requester`` the requests that wait and the reader of their replies. The
client and apps use them. May import the rest of ``client``, except ``app`` and ``blocking``.
"""
