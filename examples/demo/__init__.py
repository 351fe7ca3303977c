"""``make demo``: a node, producers, two groups, a consumer that is killed, and Spark over the same log files.

Every part is a separate process, as in a real system. Producers report to the parent how many messages were
acknowledged, and consumers which messages they handled. At the end the parent compares the reports.
"""
