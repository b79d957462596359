"""Sections of a recipe as `agentrl.train` takes them. Made by `make fields`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import BaseModel

class StageSection(TypedDict, total=False):
    """Options of the environment that hold in training from a step on."""

    from_step: int
    r"""The first step whose groups are started with them."""
    options: Mapping[str, Any]
    r"""Laid over `env.options`, until the next entry."""

class EnvSection(TypedDict, total=False):
    """Environment that the agent lives in."""

    id: str
    r"""An installed name (`agentrl envs` lists them), `module:Class`, or a Gymnasium id."""
    options: Mapping[str, Any]
    r"""Keyword arguments of the environment's constructor. One that has `prompt: agentrl.Prompt` (`short` or `full`) gets `full` with a pretrained model, unless it is given here."""
    wrappers: Sequence[Mapping[str, Any]]
    r"""Wrappers around it, the first innermost: each an `id`, an installed name or `module:Class` of a `gymnasium.Wrapper`, and beside it keyword arguments of its constructor."""
    schedule: Sequence[StageSection | Mapping[str, Any] | BaseModel]
    r"""Options that change with the step, in training alone: a schedule of difficulty."""
    servers: Sequence[str]
    r"""Addresses, `ws://HOST:PORT`, of servers that `agentrl env-serve` started with this recipe: each episode plays on the one with the fewest per worker, and continues on another if that is lost. Empty: episodes play here."""

class LocalModelSection(TypedDict, total=False):
    """A small Qwen3 with random weights and a tokenizer trained on the environment's own dialogues."""

    hidden_size: int
    r"""Width of the hidden states: an even number for each of `num_heads`."""
    num_layers: int
    r"""Transformer blocks."""
    num_heads: int
    r"""Query heads of each attention layer."""
    num_kv_heads: int
    r"""Key and value heads, each shared by `num_heads / num_kv_heads` query heads."""
    intermediate_size: int
    r"""Width of the feed-forward layers."""
    max_positions: int
    r"""Longest row the model takes, in tokens; `rollout.max_context_tokens` must fit."""
    initializer_std: float
    r"""Standard deviation of the initial weights."""
    vocab_size: int
    r"""Largest number of tokenizer entries: 256 bytes, 5 control tokens, and tokens merged from them."""

class LoraSettingsSection(TypedDict, total=False):
    """Low-rank adapters, which are trained in place of the model's own weights."""

    rank: int
    r"""Rank of the change of each weight."""
    alpha: int
    r"""Scale of the change: `alpha / rank`."""
    target_modules: Literal["all-linear"] | Sequence[str]
    r"""Linear layers to adapt, by the ends of their names: `[q_proj, v_proj]`. `all-linear`: all but the head. The experts and routers of a mixture stay as they are."""
    merge: bool
    r"""Let an engine in half precision sample from weights with the adapters merged in, which is faster and works for every model. Rounding then removes most of a young adapter: `mismatch/lost_change` is the share. In float32 adapters are merged anyway, and nothing is lost."""

class ModelSection(TypedDict, total=False):
    """The model to train."""

    name_or_path: str | None
    r"""A Hugging Face model: a folder, or a name on the hub. None: a small one is made locally, see `local`."""
    local: LocalModelSection | Mapping[str, Any] | BaseModel
    r"""The model to make if `name_or_path` is None."""
    attention: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] | None
    r"""Attention implementation of transformers, unless rows are laid out as a tree. None: sdpa if the model has it, else eager (gpt-oss). The last three train on GPUs alone; with flash_attention_2 and 3, which have no float32 to prove a layout in, rows are padded."""
    lora: LoraSettingsSection | Mapping[str, Any] | BaseModel | None
    r"""Train low-rank adapters in place of the weights. None: train the weights. An empty section: adapters of default size."""

class WarmupSection(TypedDict, total=False):
    """Supervised training before reinforcement learning, on demonstrations of the environment's `oracle()` or on a file."""

    steps: int
    r"""Optimizer steps; 0: no warm-up. With `dialogues`: 20."""
    dialogues: str | Path | None
    r"""A file of dialogues to imitate in place of the environment's oracle: JSONL, each line `{"messages": [...]}` in OpenAI's form, maybe with `"tools": [...]`, else those of the environment. For pretrained models."""
    batch_size: int
    r"""Demonstrations per step. With a pretrained model: 8."""
    num_demonstrations: int
    r"""Demonstrations that the oracle plays; they are gone through again when they run out. With a pretrained model: 256."""
    learning_rate: float
    r"""Step size of AdamW; rises over the first tenth of the steps (at most 20), falls over the last quarter (at most 50). With a pretrained model: 2e-5, with adapters 2e-4."""
    skill: float
    r"""Share of turns that the demonstrations play right: a policy that was shown perfection has no spread to learn from."""

class HistorySection(TypedDict, total=False):
    """History that the next context shows. The opening and the replies to the last action are always shown."""

    tool_results: int | None
    r"""So many of the newest tool results are shown; of an older one, a short line. Null: all."""
    turns: int | None
    r"""So many of the last turns, actions with the replies to them, are shown beside the opening. Null: all."""

class GroupRewardSection(TypedDict, total=False):
    """A reward function of all episodes of a group, and its weight."""

    reward: str
    r"""`module:function`, or an installed one. By name it takes lists with an entry for each episode: `num_tokens`, `rewards`, `completions`, `messages`, `successes`, `truncated`; it returns such a list, and may be `async def`."""
    weight: float
    r"""Factor of each number before it is added to the reward of the last turn."""
    name: str | None
    r"""Name of the reward component. None: the function's."""
    options: Mapping[str, Any]
    r"""Further arguments of the function."""

class CurriculumSection(TypedDict, total=False):
    """Tasks that the policy solves nearly always, or hardly ever, rest for some epochs and come back."""

    visits: int
    r"""Visits over which the mean success rate of a task is taken; after a rest, over as many new ones."""
    rest: int
    r"""Epochs of a rest."""
    low: float | None
    r"""A task rests if its rate is at most this. Null: no lower bound."""
    high: float | None
    r"""A task rests if its rate is at least this. Null: no upper bound."""

class BranchSection(TypedDict, total=False):
    """Rollouts forked from an episode's turns with `env.fork`, played only if the credit scheme reads them."""

    num: int
    r"""Rollouts per forked turn."""
    every: int
    r"""Turns from one fork to the next, beginning with the first turn."""
    budget_tokens: int
    r"""Tokens sampled for one episode's forks after which no other rollout is started. Each turn gets one rollout, then a second, and so on."""

class RolloutSection(TypedDict, total=False):
    """Limits, group size and staleness of rollouts."""

    mode: Literal["sync", "partial", "async"]
    r"""`sync`: every episode of a step is awaited before its update. `partial`: a step takes complete groups, the oldest first; the other episodes are interrupted, and continue with the next weights. `async`: the same, but sampling continues during the update, and is interrupted only while weights are replaced."""
    max_staleness: int
    r"""`partial`, `async`: groups are started at most this many steps ahead; `stale` decides about tokens that were sampled more policy versions ago."""
    keep_cache: bool
    r"""`async`, with vLLM's servers: actions under way at a weight sync are not interrupted. They continue under the new weights with the keys and values of the old ones, so their later tokens are sampled by neither (`mismatch/difference` with `loss.anchor: sampled`). The next action computes its context again."""
    stale: Literal["wait", "mask", "keep"]
    r"""`wait`: a step waits for the groups that would become too old, so that no token is. `mask`: the step does not wait; tokens that are too old leave the loss. `keep`: they are trained on. Either way they are counted (`staleness/too_old`)."""
    num_groups: int
    r"""Tasks for each step."""
    group_size: int
    r"""Episodes per task."""
    temperature: float
    r"""Sampling temperature; log-probabilities are those of the tempered distribution, in rollouts and in training."""
    top_p: float
    r"""Must stay 1: a truncated support makes the importance ratio of the tokens cut off undefined."""
    max_turns: int
    r"""Largest number of actions per episode."""
    max_turn_tokens: int
    r"""Largest number of tokens sampled per action."""
    cut_off: Literal["end", "act"]
    r"""Consequence of an action that `max_turn_tokens` cuts off. `end`: it is not carried out, and the episode ends. `act`: the environment gets what was said; an unfinished call is a malformed one. A model that says much before it has learned to be brief earns nothing at all with `end`."""
    max_episode_tokens: int
    r"""Largest number of tokens sampled per episode."""
    max_context_tokens: int
    r"""Largest number of tokens in a context, prompt and actions together."""
    history: HistorySection | Mapping[str, Any] | BaseModel
    r"""Part of the earlier turns that a context shows; by default all."""
    max_live_episodes: int | None
    r"""Episodes played at once by a rank, each environment on a thread of its own. Null: those of its step, at least 64."""
    env_timeout_s: float
    r"""Deadline of each reset and step of an environment, and of each call of a group reward, in seconds."""
    engine_timeout_s: float
    r"""Deadline of each completion, in seconds. With `engine.lockstep` it includes waiting for the environments of the other live episodes: leave it well above `env_timeout_s`."""
    max_retries: int
    r"""Retries per episode: after a failure of the environment it restarts with a fresh one, after one of the engine or of an environment server it resumes."""
    dynamic_sampling: int
    r"""Largest number of groups per step that are replaced by new tasks because all of their episodes earned the same (DAPO, arXiv 2503.14476); further ones are kept. Schemes that compare the returns of siblings learn nothing from such groups; schemes that compare turns may; with schemes that read a critic, a judge, a teacher or an answer it is refused."""
    group_rewards: Sequence[GroupRewardSection | Mapping[str, Any] | BaseModel]
    r"""Rewards that compare the episodes of a group, or count their tokens; added in training only, before credit is assigned. `dynamic_sampling` ignores them."""
    curriculum: CurriculumSection | Mapping[str, Any] | BaseModel | None
    r"""Rule by which tasks of a table rest for a while. Null: none rest."""
    branches: BranchSection | Mapping[str, Any] | BaseModel
    r"""Forked rollouts, for credit schemes that read them."""
    max_consecutive_failures: int
    r"""Number of episodes in a row that failed in spite of their retries, or of groups in a row that had to be replaced, after which the run stops with the last error."""

class CriticSection(TypedDict, total=False):
    """A value for each token's context, learned beside the policy by regression on the returns."""

    model: Literal["head", "separate"]
    r"""`head`: two small layers on the policy's hidden states, which they do not change. `separate`: a copy of the policy as it begins, trained as a whole; with `model.lora` its adapters are."""
    learning_rate: float
    r"""Step size of AdamW."""
    epochs: int
    r"""Passes over each step's trajectories."""
    num_minibatches: int
    r"""Optimizer updates for each pass."""

class SignalsSection(TypedDict, total=False):
    """Sources of the signals that some credit schemes read; none costs anything until a scheme asks for it."""

    critic: CriticSection | Mapping[str, Any] | BaseModel
    teacher: str | None
    r"""Hugging Face model whose log-probabilities a scheme may read: a folder, or a name on the hub; its vocabulary must be the policy's."""
    judge: str | None
    r"""`module:function` that is given a trajectory and returns one score for each of its turns; it may be `async def`. Called on threads."""
    judge_timeout_s: float
    r"""Deadline of each call of the judge, in seconds."""
    judge_retries: int
    r"""Retries of a call of the judge that raised or hung, before the run stops."""
    judge_threads: int
    r"""Calls of the judge at the same time."""

class GateSection(TypedDict, total=False):
    """Temperatures of the gate 4 / tau sigmoid(tau (ratio - 1)): the larger, the sooner it closes."""

    positive: float
    r"""For tokens of positive advantage."""
    negative: float
    r"""For the others."""

class CalibratedSection(TypedDict, total=False):
    """Ranges that follow the spread of log-ratios, for each staleness."""

    clipped: float
    r"""Share of the tokens of positive, and of negative, advantage that the range is to clip."""
    by_length: bool
    r"""Units of 1, 2 to 7, 8 to 31, ... tokens have ranges of their own."""

class KernelSection(TypedDict, total=False):
    """Exponents c1, c2 of the weight W^c1 exp(c2 (1 - W)) of a unit, W being the product of its tokens' ratios."""

    positive: Sequence[float]
    r"""For tokens of positive advantage."""
    negative: Sequence[float]
    r"""For tokens of negative advantage."""

class CovarianceSection(TypedDict, total=False):
    """Restraint on the tokens that lower the entropy most: those whose advantage and log-probability are high together."""

    rule: Literal["clip", "kl"]
    r"""`clip` (Clip-Cov): the policy loss gives no gradient to some tokens, drawn from those within `band`. `kl` (KL-Cov): the tokens of the highest covariance pay `coefficient` times |log-probability - the anchor's|."""
    share: float
    r"""Share of a minibatch's tokens that it concerns; one token at least."""
    band: Sequence[float]
    r"""Covariances, (advantage - mean) times (log-probability at sampling - mean), between which `clip` draws."""
    coefficient: float
    r"""Weight of the penalty of `kl`. With `anchor: behavior` the engine's rounding decides its sign for tokens that have not moved; `anchor: recomputed` keeps that out."""

class NLLSection(TypedDict, total=False):
    """Imitation beside reinforcement learning: -log pi of tokens, weighed among themselves as `loss.aggregation` says."""

    coefficient: float
    r"""Weight in the loss."""
    of: Literal["successes", "demonstrations"]
    r"""Tokens to imitate. `successes`: of the minibatch's episodes that report `success`. `demonstrations`: of some of those of the section `warmup`, drawn for each update; the warm-up itself may have no steps."""
    batch_size: int
    r"""Demonstrations of each update."""

class LossSection(TypedDict, total=False):
    """The loss section of a recipe."""

    algorithm: str
    r"""Name of an algorithm, which sets the fields below that are not given (`agentrl algorithms` lists names and fields). `loss: NAME` is short for it."""
    unit: Literal["trajectory", "turn", "version", "token"]
    r"""Tokens that share one importance ratio: `trajectory` (GSPO), `turn`, `version` (runs of one policy version within a turn) or `token` (PPO, GRPO)."""
    trust: Literal["none", "fixed", "calibrated", "token", "geometric", "cap", "gate", "kernel", "tv", "kl"]
    r"""When a token is pushed no further. `fixed`: its unit's ratio leaves the clip range (PPO, GRPO, GSPO). `token`: its own ratio leaves the range of single tokens. `geometric`: so too, and the unit's ratio is made of clipped ones (GMPO). `tv`, `kl`: its probability moved by more than the range (DPPO). `calibrated`: its unit's ratio leaves a range that follows how far ratios spread. Never: the ratio is capped (`cap`: CISPO), fades by a soft gate (`gate`: SAPO) or as the unit's whole probability changes (`kernel`: VESPO), or is left out (`none`: REINFORCE)."""
    clip_low: float | None
    r"""A ratio below 1 - clip_low stops pushing a token of negative advantage further down; with `tv` and `kl`, a divergence above clip_low. None: follows what is clipped (trajectory 3e-4, turn and version 3e-3, token 0.2; `geometric` 0.33, `cap` 1, `tv` 0.15, `kl` 0.05)."""
    clip_high: float | None
    r"""A ratio above 1 + clip_high stops pushing a token of positive advantage further up; with `tv` and `kl`, a divergence above clip_high. None: follows what is clipped (trajectory 4e-4, turn and version 4e-3, token 0.27; `geometric` 0.49, `cap` 4, `tv` 0.15, `kl` 0.05)."""
    clip_by_length: int | None
    r"""Tokens of a unit for which `clip_low` and `clip_high` are meant: those of a unit of n tokens are wider by sqrt(clip_by_length / n). For `trust: fixed`. None: the same range at every length."""
    gate: GateSection | Mapping[str, Any] | BaseModel | None
    r"""Settings of `trust: gate`. None: its defaults."""
    calibrated: CalibratedSection | Mapping[str, Any] | BaseModel | None
    r"""Settings of `trust: calibrated`. None: its defaults."""
    kernel: KernelSection | Mapping[str, Any] | BaseModel | None
    r"""Settings of `trust: kernel`. None: its defaults."""
    reject: float | None
    r"""A unit whose ratio is above this, or below one over it, leaves the loss whole, but for its part in `kl_coefficient`. None: none does."""
    aggregation: Literal["trajectory-mean", "turn-mean", "token-mean", "constant"]
    r"""Weight of a token: every trajectory weighs the same (`trajectory-mean`), every turn (`turn-mean`), every token (`token-mean`), or 1 / (number of trajectories * constant_length) (`constant`)."""
    constant_length: int | None
    r"""Tokens by which `aggregation: constant` divides, and no other, in place of each trajectory's own length."""
    anchor: Literal["behavior", "recomputed", "sampled"]
    r"""Denominator of the ratio: `behavior`, the log-probabilities recorded by the engine at sampling; `recomputed`, the trainer's own before the first update on the batch; `sampled`, the trainer's own under the weights that sampled each token, so that the ratio holds its staleness, and nothing of the engine."""
    kept_versions: int
    r"""Policy versions whose trained weights stay in the host's memory with `anchor: sampled`. Tokens of older ones are compared with the engine's log-probabilities (`staleness/unkept`)."""
    mismatch: Literal["off", "truncate", "mask"]
    r"""Correction of units on which engine and trainer disagree, if `anchor: recomputed` or `sampled` leaves the engine out of the ratio: weigh them by exp(mean of anchor - engine log-probabilities), `truncate`d at the limit, or `mask`ed beyond it."""
    mismatch_limit: float
    r"""Largest weight (and, for `mask`, one over the smallest)."""
    mismatch_level: Literal["unit", "token", "product"]
    r"""Tokens whose mismatch is corrected together: by the mean over the ratio's `unit`; each `token` by its own; or by the `product` over the trajectory, which is exact and far from 1 on long ones. The latter two whatever the unit."""
    off_policy_limit: float | None
    r"""A trajectory whose tokens are less probable now than at sampling, by more nats a token than this in the mean, leaves the loss with its tokens of negative advantage (DeepSeek-V3.2). None: none does."""
    kl_coefficient: float
    r"""Weight of the KL divergence to the reference policy. 0: none is kept, but for a credit scheme that reads it."""
    kl_estimator: Literal["k2", "k3", "unbiased", "k1_reward"]
    r"""Estimate of that divergence: `k2`, whose gradient is that of KL(policy || reference) for tokens that the policy sampled; `k3` (GRPO), whose gradient is that of KL(reference || policy); `unbiased` (DeepSeek-V3.2), k3 weighed by the token's ratio; `k1_reward` (PPO for RLHF, RLOO, REINFORCE++), which the credit scheme sees: each turn's reward loses kl_coefficient times the sum over its tokens of (log-probability at sampling - the reference's). Metrics and records show the environment's own rewards."""
    entropy_coefficient: float
    r"""Weight of the entropy of the tokens' distributions, averaged as `aggregation` says, which is added to the objective: above 0 it keeps the policy random."""
    covariance: CovarianceSection | Mapping[str, Any] | BaseModel | None
    r"""Restraint on the tokens that lower the entropy most (Clip-Cov, KL-Cov). None: there is none."""
    nll: NLLSection | Mapping[str, Any] | BaseModel | None
    r"""Imitation of successful episodes or of demonstrations, beside the policy loss. None: there is none."""
    distill_coefficient: float
    r"""Weight of the KL divergence to the model that `signals.teacher` names (estimated as k2). 0: none, and no teacher is needed. The credit scheme `distill` learns from the teacher alone."""
    routing_replay: Literal["none", "trainer", "engine"]
    r"""Experts that the updates of a mixture use: those that it chooses itself; those of the `trainer` before the first update (Routing Replay, GSPO paper, section 5.3); or those of the `engine` at sampling (arXiv 2510.11370), if it returns them: `transformers`, and vLLM on a GPU. Ratios of `unit: token` need it by the GSPO paper, those of trajectories do not."""

class TrainSection(TypedDict, total=False):
    """The optimizer, its minibatches and passes."""

    steps: int
    r"""Rounds of collecting and updating."""
    num_minibatches: int
    r"""Parts into which each step's rollouts are drawn (the GSPO paper's four): an optimizer update for each that has a gradient."""
    epochs: int
    r"""Times that a step goes over its rollouts (PPO's epochs), each time in `num_minibatches` minibatches of its own. Ratios compare with the policy before the first of them; with `loss.anchor: recomputed` or `sampled` every epoch takes a forward pass more."""
    max_tokens_per_micro_batch: int
    r"""Most tokens in one forward and backward pass, padding included; a token that rows share counts once. A longer trajectory is a pass of its own."""
    layout: Literal["auto"] | Literal["tree", "packed", "padded"]
    r"""Layout of rows: `tree` computes shared prefixes once, `packed` concatenates short rows, `padded` stacks them. `auto`: the first of these that is proven exact for the model when the run begins."""
    learning_rate: float
    r"""Step size of AdamW. With a pretrained model 1e-6, with adapters 1e-5, unless it is given: right for billions of parameters; models of fewer learn faster at ten times as much."""
    schedule: Literal["constant", "linear", "cosine"]
    r"""Course of the learning rate after its warm-up."""
    warmup_minibatches: int
    r"""Minibatches over which the learning rate rises from 0. Those without a gradient count, here and in the schedule: it is then at the same point of each step in any run, and ends with it."""
    target_kl: float | None
    r"""Largest KL divergence of a step, in nats a token: an update that exceeds it, at the tokens of the next minibatch, is halved until it does not. None: no bound. The last update is measured at a sample of the first minibatch, an eighth of the step's tokens; if tokens are stale and `loss.anchor` is `behavior`, the others at an eighth of the next minibatch. The metric `kl/step` is the largest divergence before the last update: 0 with one minibatch."""
    ess_scaling: bool
    r"""Multiply the learning rate of each update by the square root of `ratio/effective_samples` of its minibatch: small if few trajectories outweigh the rest, as among stale ones (VCPO)."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]
    r"""`adamw`: torch's. `adamw_8bit`, `paged_adamw`, `paged_adamw_8bit`: of bitsandbytes, for less memory."""
    gradient_checkpointing: bool | int
    r"""Keep the inputs of each layer and compute the rest again in the backward pass: slower, for less memory. A number: of every n-th layer, from 2 on."""
    compile: Literal["none", "layers"]
    r"""`layers`: each layer of the model is compiled by itself (`torch.compile`), which takes minutes at the first passes; a tree's attention stays outside of its graphs. Not with `sharding: full`."""
    betas: Sequence[float]
    r"""Decay of Adam's running means of the gradient and of its square."""
    weight_decay: float
    r"""Decoupled weight decay of AdamW."""
    max_grad_norm: float
    r"""Gradients are scaled down to this norm."""
    precision: Literal["float32", "bfloat16"]
    r"""`bfloat16`: autocast over float32 weights."""
    bfloat16_copy: bool
    r"""With `precision: bfloat16`, passes compute with a copy of the weights that is rounded once for a minibatch, in place of each weight for each pass; hidden states are bfloat16 between layers too, as they are with shards and adapters anyway. Fewer kernels and smaller activations; for whole weights, 1.4 to 1.8 times the rounding error."""
    sharding: Literal["none", "full"]
    r"""Sharding over ranks. `none`: each holds all weights (DDP). `full`: weights, gradients and the optimizer's state are sharded (FSDP2)."""
    replicas: int
    r"""Groups of consecutive ranks over each of which weights are sharded (HSDP), with `sharding: full`. As many as machines: weights are gathered within a machine, and gradients alone cross the network."""
    offload: Sequence[Literal["optimizer", "weights"]]
    r"""State that waits in the host's memory, pinned if the device is a GPU; results are the same to the last bit. `optimizer`: moments, which come back for each weight's part of an update alone. `weights`: those of policy and reference while episodes are sampled; useful with `engine.sleep`, or an engine that is not vLLM."""
    process_timeout_s: float
    r"""Longest wait of a rank for the others, in seconds; a year at most."""
    device: Literal["auto", "cpu"]
    r"""`auto`: a GPU if there is one."""
    checkpoint_every: int
    r"""Steps between checkpoints; the last step always has one."""
    keep_last: int
    r"""Newest checkpoints kept; the one with the best evaluation is kept beside them."""
    on_collapse: Literal["warn", "stop", "rewind"]
    r"""Reaction to a collapse of the policy (metric `health/collapse`). `stop`: the run ends. `rewind`: once, it goes back to the newest checkpoint from before, with half the learning rate; at the next collapse it ends. Each logs a warning."""
    stop_on: Sequence[Literal["zero_spread", "cut_off"]]
    r"""Signs (metrics `health/SIGN`) at which the run ends: for 8 steps no group had a spread of returns (`zero_spread`), or every episode was cut off (`cut_off`). Each is logged once anyway."""
    agreement: float | None
    r"""Largest mean difference allowed between the engine's log-probabilities and the trainer's under the same weights, in nats. None: follows the precision (float32 1e-3, bfloat16 0.1, and six times the trainer's own rounding error if that is more)."""

class EvaluationSection(TypedDict, total=False):
    """Evaluation of the policy on tasks of the eval split."""

    every: int
    r"""Steps between evaluations; 0: only before the first step and after the last."""
    num_tasks: int
    r"""Evaluation tasks, each evaluated exactly once (`samples` episodes each); fewer if the environment has fewer."""
    seed: int | None
    r"""Seed of the evaluation tasks: runs of several seeds that share it are evaluated on the same tasks. None: the run's."""
    samples: int
    r"""Episodes per task."""
    pass_at: Sequence[int]
    r"""The k of pass@k, each at most `samples`."""
    env: Mapping[str, Any]
    r"""Other environments to evaluate in, by name: their metrics are `eval/NAME/...`. One may stand alone (`{id: ...}`), as `eval/...`. None: that of training."""
    temperature: float
    r"""Sampling temperature; 0 takes the most probable token."""

class ReportSection(TypedDict, total=False):
    """Files that are written while a run trains."""

    rollouts_every: int
    r"""Steps between recorded rollout files (the first step always has one); 0: none."""
    keep_rollouts: int
    r"""Rollout files that are kept beside the first step's: the newest ones; older ones are deleted."""
    trackers: Sequence[str]
    r"""Trackers that get metrics, the recipe and tables of rollouts, by name: trackio, tensorboard, wandb, mlflow. Others of accelerate get metrics and the recipe."""
    project: str
    r"""Project (MLflow: experiment) of the run in trackers; the run's name is that of its folder."""

class DeploymentSection(TypedDict, total=False):
    """Processes that `agentrl up` starts and watches, each on GPUs of its own if there are any; `agentrl plan` counts them."""

    trainers: int
    r"""Processes that train."""
    servers: int
    r"""vLLM servers. 0: the engine is the recipe's."""
    tensor_parallel: int
    r"""GPUs of each server."""
    env_servers: int
    r"""Servers of environments (`agentrl env-serve`). 0: episodes play where `env` says."""
    env_workers: int
    r"""Processes in which each of these plays; on Ray each takes a core."""
    max_restarts: int
    r"""Times that the trainers are resumed after a failure; and that a server may fail in a row before it serves."""

class Sections(TypedDict, total=False):
    """Everything that defines a run."""

    seed: int
    r"""Every random choice follows from it."""
    run_dir: str | Path | None
    r"""Folder of the run. None: `runs/<recipe>-<date>`; after the environment, if it is not the recipe's."""
    chat: Any
    warmup: WarmupSection | Mapping[str, Any] | BaseModel
    engine: Any
    rollout: RolloutSection | Mapping[str, Any] | BaseModel
    signals: SignalsSection | Mapping[str, Any] | BaseModel
    loss: str | LossSection | Mapping[str, Any] | BaseModel
    train: TrainSection | Mapping[str, Any] | BaseModel
    evaluation: EvaluationSection | Mapping[str, Any] | BaseModel
    report: ReportSection | Mapping[str, Any] | BaseModel
    deployment: DeploymentSection | Mapping[str, Any] | BaseModel
