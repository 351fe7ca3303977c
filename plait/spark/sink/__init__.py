"""Sink: writes DataFrames and streaming queries to Plait, each batch once and as a whole.

``source.data_source`` creates the writers for Spark. The package may import ``runtime``, the client, frame and model.
"""
