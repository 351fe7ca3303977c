"""The version of Plait."""

VERSION = "0.1.0"
