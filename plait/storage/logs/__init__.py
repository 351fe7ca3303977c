"""The logs of a data directory and their recovery.

``log`` is the append-only file format of the message log, the action log and the retained log. The consume log is
derived from the message log. The broker writes these logs; the readers in ``storage.reading`` use the same formats. The
package imports ``frame``, ``model`` and the disk.
"""
