"""What a run leaves to read: files of rollouts, metrics, live progress, statistics, tables and plots."""
