"""Filters: which rows of a frame a reader wants, by tags and by an SQL condition.

``compile_filter`` checks a filter and translates it once; ``Filter.rows`` evaluates it on whole columns of a frame.
``ScanBudget`` bounds what filters examine in one turn of the loop. Brokers use them. May import ``errors``, ``limits``,
``model`` and ``frame``.
"""
