"""Defects that Plait once had, patched in one at a time: a generator must find each of them."""
