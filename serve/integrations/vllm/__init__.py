"""A packed checkpoint in vLLM: our linear layers and KV4 under its scheduler, tensor parallelism and server.

vLLM finds `plugin.register` by the entry point group `vllm.general_plugins` in every process it starts. Files:
`config` says what each layer gets, `linear_method` and `parameters` load and run packed linears, `kv4_backend` keeps
4-bit pages in vLLM's block pool. These know no vLLM: `launch` makes its command line, `settings` is what we can be told
in it, `ranks` says into how many a checkpoint can be cut, `versions` which vLLM this is.
"""
