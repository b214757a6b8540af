"""A packed checkpoint in vLLM: our linear layers and KV4 under its scheduler, tensor parallelism and server.

vLLM finds `plugin.register` by the entry point group `vllm.general_plugins` in every process it starts. Files:
`config` says what each layer gets, `linear_method` and `parameters` load and run packed linears, `kv4_backend` keeps
4-bit pages in vLLM's block pool, `versions` knows which vLLM this is.
"""
