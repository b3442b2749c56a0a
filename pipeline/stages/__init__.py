"""The five stages of a run, each a function over records and a job of its own."""
