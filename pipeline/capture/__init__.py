"""The capture proxy: a harness believes that it calls a model API, and the exact token ids that were sampled are kept.

``supervisor`` is the way in for other rooms, ``rows`` turns a finished trace into training rows. The rest runs inside
the shard processes, which import neither torch nor vLLM.
"""
