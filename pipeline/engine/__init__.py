"""Start and watch vLLM, and push the trainer's weights into it. What the engine serves is named ``policy``."""
