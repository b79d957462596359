"""Engines: token ids in, sampled token ids and their log-probabilities out."""

from agentrl.engine.base import Engine, EngineConfig, EngineContext, Sampler

__all__ = ["Engine", "EngineConfig", "EngineContext", "Sampler"]
