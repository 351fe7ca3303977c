"""``make demo``: a node, producers, two groups, a consumer that is killed, and Spark over the same log files.

Every part is a process of its own, as in a real system. The parent only watches: producers tell it what was
acknowledged to them, consumers what they handled, and at the end it adds up.
"""
