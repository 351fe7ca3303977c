"""The version of this Plait."""

VERSION = "0.1.0"
