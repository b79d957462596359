"""The engines that sample with vLLM, in the process or as servers."""
