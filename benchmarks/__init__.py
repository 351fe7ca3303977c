"""Programs that measure Plait and the message queues it is compared with."""
