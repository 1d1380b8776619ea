"""Engine, pool and interface of inference servers over HTTP, common to vLLM and SGLang."""
