"""Yoke: train one open-weight model inside the coding agents that people really use."""

__version__ = "0.1.0"
