"""Everything that samples (stage 2): the vLLM engine, the worker's loop, which worker gets which group."""
