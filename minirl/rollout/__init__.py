"""Everything that samples (stage 2): the vLLM engine, the worker's loop, dispatch of groups."""
