"""Measurements and judgements of the adapters in real hosts, on a Hopper GPU: `python3 -m tests.hosts.NAME --help`.

`vllm_checkpoint`, `vllm_values`, `judge_values`: log-probabilities and tokens of vLLM with the adapter off and on, judged by a
float32 pass. `vllm_life`: aborts, preemptions, blocks and compilations while serving. `vllm_speed`: times of steps and of runs.
`transformers_speed`: errors and times of Transformers. pytest collects the unit tests of their parts alone.
"""
