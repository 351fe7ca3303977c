"""Defects that Plait once had, put back one at a time: which generator finds each of them by itself."""
