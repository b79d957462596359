"""A loop of one's own, without critics, evaluation, checkpoints: python examples/own_loop.py examples/calculator.yaml"""

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from agentrl import assign_credit, load_credit
from agentrl.learn.warmup import warm_up
from agentrl.recipe.config import load_recipe
from agentrl.run import parts

recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:])
rollout, train = recipe.rollout, recipe.train
max_tokens, shard = rollout.max_context_tokens, parts.task_shard(recipe.engine, num_groups=rollout.num_groups)
with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
    accelerator = parts.build_accelerator(train)
    env = parts.build_env(recipe.env, runner=runner, seed=recipe.seed)
    tokenizer = parts.build_tokenizer(recipe.model, env, warmup=recipe.warmup, rollout=rollout, runner=runner)
    loaded = parts.build_model(recipe.model, max_context_tokens=max_tokens, tokenizer=tokenizer)
    renderer = recipe.chat.build(loaded.tokenizer, name="own")
    on = {"train": train, "device": accelerator.device}
    engine = parts.build_engine(recipe.engine, loaded.model, rollout=rollout, shard=shard, handover=Path(folder), **on)
    stack.callback(lambda: runner.run(engine.close()))
    policy, _ = parts.build_policy(recipe.model, loaded, max_context_tokens=max_tokens, **on)
    pool = parts.build_pool(rollout, env, engine=engine, renderer=renderer, shard=shard)
    stack.callback(pool.close)
    learner = parts.build_learner(recipe.loss, policy, train=train, accelerator=accelerator)
    credit = load_credit(recipe.credit)
    count = recipe.warmup.num_demonstrations
    shown = parts.demonstrate(env, renderer, config=recipe.warmup, rollout=rollout, count=count, runner=runner)
    warm_up(policy, shown, recipe.warmup, seed=recipe.seed, max_tokens=train.max_tokens_per_micro_batch)
    for step in range(train.steps):
        runner.run(pool.pause())
        runner.run(engine.load_weights(learner.state.weights(), step))
        groups = runner.run(pool.collect())
        learner.update(groups, assign_credit(credit, groups), version=step)
        print(step + 1, "reward", sum(t.reward for g in groups for t in g.trajectories))
