"""The engines that generate tokens, behind the interface `onbeat.engines`, and what they need.

registry              the installed engines by name, and the deadlines of their start and stop
weight_files          the safetensors file of a version, checked before it is loaded
vllm_engine           vLLM; `vllm_platform` has what it needs on each device
weight_transfer       its plug-in in vLLM's processes, with `vllm_kernels`, `cpu_sampling` and `vllm_mixtral`
vllm_core             the process of its engine core
vllm_isa              another plug-in there: the limits of the processor's instructions
transformers_engine   the reference: a plain Hugging Face model
"""
