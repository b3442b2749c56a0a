"""Roles of ranks, the coordinator between them, and how a run is started on this machine or on a cluster."""
