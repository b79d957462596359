"use strict";
/* What the page tells of runs as a whole: overview, every metric, warnings, recipes. Each function returns a panel. */

/** Metrics of the overview, as far as a run has them; of those in one list, the first. */
const LEARNING = [
  ["eval/success", "eval/score", "eval/pass@1"],
  ["eval/reward"],
  ["episode/success", "episode/score"],
  ["reward/mean"],
];
const UPDATES = [["entropy"], ["kl/step"], ["clip/tokens"], ["staleness/mean", "grad_norm"]];

/** What metrics are called; the others are named by `nameOf`. */
const NAMES = {
  "clip/tokens": "Clipped tokens",
  "clip/tokens_negative": "Clipped tokens of negative advantage",
  "clip/tokens_positive": "Clipped tokens of positive advantage",
  "clip/units": "Units with a clipped token",
  "clip/units_one_sided": "Units of both signs with a clipped token",
  "credit/mixed_sign_units": "Units with advantages of both signs",
  "credit/zero_advantage": "Episodes without advantage",
  "episode/score": "Training: score",
  "episode/success": "Training: success",
  "first/clipped_tokens": "Tokens clipped before any update",
  "first/engine_difference": "Distance of trainer and engine",
  "first/ratio_deviation": "Largest ratio deviation before any update",
  "groups/zero_spread": "Groups without spread",
  "kl/behavior": "KL to the sampling policy",
  "kl/reference": "KL to the reference policy",
  "kl/step": "KL of a step",
  "process/memory_bytes": "Memory",
  "ratio/effective_samples": "Effective samples",
  "ratio/mean": "Importance ratio: mean",
  "ratio/spread": "Importance ratio: spread",
  "ratio/token_spread": "Importance ratio of tokens: spread",
  "reward/mean": "Training: reward",
  "reward/spread": "Training: spread of rewards",
  "time/sampled_tokens_per_s": "Sampled tokens per second",
  "time/step_s": "Time of a step",
  "time/tokens_per_s": "Tokens per second",
  entropy: "Policy entropy",
  grad_norm: "Gradient norm",
};
const PREFIXES = { eval: "evaluation: ", stop: "ended by ", tool: "calls of ", log: "log: ", process: "", turn: "turn: " };

/** A name that reads: that of `NAMES`, else the metric's own in words. */
function nameOf(metric) {
  const spell = (name) => {
    if (Object.hasOwn(NAMES, name)) return NAMES[name];
    const [first, ...rest] = name.split("/");
    const words = (text) => text.replace(/_(s|bytes)$/, "").replaceAll("_", " ");
    if (!rest.length) return words(first);
    const isNamed = (each) => Object.hasOwn(PREFIXES, each);
    const own = first === "episode" && isNamed(rest[0]) ? "" : `${words(first)}: `;
    const prefix = isNamed(first) ? PREFIXES[first] : own;
    const inner = spell(rest.join("/"));
    return prefix + inner.charAt(0).toLowerCase() + inner.slice(1);
  };
  const name = spell(metric);
  return name.charAt(0).toUpperCase() + name.slice(1);
}

/** What a metric's axis counts, where its numbers do not say so themselves. */
function unitOf(metric) {
  const units = [
    [/_per_s$/, "tokens / s"],
    [/_(s|bytes)$/, ""],
    [/(^|\/)stop\//, "share of episodes"],
    [/(success|pass@\d+)$/, "share solved"],
    [/zero_advantage|truncated$/, "share of episodes"],
    [/^clip\/.*tokens|clipped_tokens/, "share of tokens"],
    [/units/, "share of units"],
    [/^ratio\/effective/, "share"],
    [/^ratio\//, "ratio"],
    [/entropy|^kl\/|_difference$/, "nats"],
    [/^groups\//, "share of groups"],
    [/reward/, "reward"],
    [/(^|\/)tool(\/|_)/, "calls / episode"],
    [/staleness\/(mean|max)/, "versions"],
    [/_tokens(_max)?$/, "tokens"],
    [/turns(_max)?$/, "turns"],
  ];
  return units.find(([form]) => form.test(metric))?.[1] ?? "";
}

/** The curves of a metric, under a name that reads, beside its own. */
function metricChart(metric, data, height) {
  const figure = lineChart({ title: nameOf(metric), metric, unit: unitOf(metric), curves: data.curves[metric], height });
  figure.querySelector(".name").after(el("code", { class: "metric" }, plain(metric)));
  return figure;
}

/** A slider for the smoothing of all charts. */
function smoothingControl() {
  const words = el("output", {});
  const slider = el("input", { type: "range", min: "0", max: "0.95", step: "0.05", class: "smoothing", oninput: smooth });
  function smooth() {
    smoothing.weight = Number(slider.value);
    for (const each of document.querySelectorAll("input.smoothing")) {
      each.value = slider.value;
      each.nextElementSibling.replaceChildren(slider.value);
    }
    requestAnimationFrame(() => eachChart((chart) => chart.redraw()));
  }
  slider.value = String(smoothing.weight);
  words.replaceChildren(slider.value);
  return el("label", { class: "smooth" }, "Smoothing ", slider, words);
}

const SHARED = ["time/collect_s", "time/signals_s", "time/credit_s", "time/update_s", "time/push_s"];

function overviewPanel(data, open) {
  const draw = (names) => names.filter(Boolean).map((name) => metricChart(name, data, 170));
  const learning = draw(LEARNING.map((names) => names.find((name) => data.curves[name])));
  const isDrawn = (name) => data.curves[name] && data.constants[name] === undefined;
  const updates = draw(UPDATES.map((names) => names.find(isDrawn)));
  return [
    alertsOf(data, open),
    tiles(data),
    data.recipes.length > 1 || data.runs.length > 1 ? legendOfRuns(data) : null,
    el("div", { class: "heading" }, el("h2", {}, "Learning"), smoothingControl()),
    learning.length ? el("div", { class: "grid" }, learning) : el("p", { class: "muted" }, "No step is finished yet."),
    updates.length > 0 && [el("h2", {}, "Updates"), el("div", { class: "grid" }, updates)],
    el("h2", {}, "Episodes and time"),
    el(
      "div",
      { class: "grid stacks" },
      componentsChart(data),
      data.recipes.flatMap((recipe, index) => stacksOf(data, recipe, index)),
      isDrawn("process/memory_bytes") && metricChart("process/memory_bytes", data, 180),
    ),
    evaluations(data),
  ];
}

/** What went wrong, in one box; nothing where nothing did. */
function alertsOf(data, open) {
  const failed = data.rollouts.filter((entry) => entry.failed).length;
  const lines = [
    ...data.notices,
    ...data.warnings.slice(-3).map((warning) => `step ${warning.step}: ${warning.words.split("\n")[0]}`),
    ...(data.faults.length ? [`The environment failed in ${count(data.faults.length, "way")}.`] : []),
    ...(failed ? [`${count(failed, "recorded rollout")} failed, and left the loss.`] : []),
  ];
  if (!lines.length) return null;
  return el(
    "section",
    { class: "alerts", "aria-label": "Warnings" },
    el(
      "ul",
      {},
      lines.map((line) => el("li", {}, plain(line))),
    ),
    el("button", { onclick: () => open("warnings") }, "All warnings and faults"),
  );
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function lastOf(curve) {
  const index = curve.mean.findLastIndex((value) => value !== null);
  return index < 0
    ? null
    : { value: curve.mean[index], first: curve.mean.find((value) => value !== null), step: curve.steps[index] };
}

/** The newest values, large. With several recipes, of the first; the charts show all. */
function tiles(data) {
  const names = [
    ["Success", ["eval/success", "episode/success", "eval/score", "episode/score"]],
    ["Reward", ["eval/reward", "reward/mean"]],
    ["Clipped tokens", ["clip/tokens"]],
    ["Entropy", ["entropy"]],
    ["Time of a step", ["time/step_s"]],
    ["Tokens per second", ["time/tokens_per_s"]],
    ["Memory", ["process/memory_bytes"]],
  ];
  const made = names.flatMap(([label, wanted]) => {
    const name = wanted.find((each) => data.curves[each]);
    const found = name && lastOf(data.curves[name][0]);
    if (!found) return [];
    const where = name.startsWith("eval/") ? "evaluated" : "trained";
    const change = /^(eval|reward|episode)\//.test(name)
      ? `${where}; at first ${shown(found.first, name, 3)}`
      : `at first ${shown(found.first, name, 3)}`;
    return [
      el(
        "div",
        { class: "tile" },
        el("dt", {}, label),
        el("dd", {}, shown(found.value, name, 3), el("small", {}, change)),
      ),
    ];
  });
  return made.length ? el("dl", { class: "tiles" }, made) : null;
}

function legendOfRuns(data) {
  const entries = data.recipes.map((recipe, index) => ({
    name: `${recipe.name} (${count(recipe.runs.length, "run")})`,
    color: index,
  }));
  const most = Math.max(...data.recipes.map((recipe) => recipe.runs.length));
  const words = `Thin lines are single seeds${most > 2 ? "; bands are 95 % intervals of their mean" : ""}.`;
  return el("div", { class: "key" }, legendOf(entries), most > 1 && el("small", {}, words));
}

/** The components of the reward in one chart, where there are several and one recipe. */
function componentsChart(data) {
  const names = Object.keys(data.curves).filter((name) => /^reward\/(?!mean$|spread$)/.test(name));
  if (data.recipes.length > 1 || names.length < 2) return null;
  const curves = names.map((name, index) => {
    const { steps, mean } = data.curves[name][0];
    return { name: name.slice("reward/".length), color: index, steps, mean };
  });
  const figure = lineChart({ title: "Components of the reward", metric: "", curves, height: 180 });
  figure.querySelector(".name").after(legendOf(curves));
  return figure;
}

/** Where the time goes, and how episodes end, of one recipe. */
function stacksOf(data, recipe, index) {
  const of = (name) => data.curves[name]?.find((curve) => curve.color === index);
  const stack = (title, names, metric, label) => {
    const found = names.filter((name) => of(name)?.mean.some((value) => value > 0));
    if (!found.length) return null;
    const steps = of(found[0]).steps;
    const parts = found.map((name) => {
      const curve = of(name);
      const at = new Map(curve.steps.map((step, place) => [step, curve.mean[place]]));
      return { name: label(name), values: steps.map((step) => at.get(step) ?? 0) };
    });
    const suffix = data.recipes.length > 1 ? `, ${recipe.name}` : "";
    return stackChart({ title: title + suffix, metric, unit: unitOf(found[0]), steps, parts });
  };
  const after = (name) =>
    name
      .slice(name.indexOf("/") + 1)
      .replace(/_s$/, "")
      .replaceAll("_", " ");
  const stops = Object.keys(data.curves).filter((name) => name.startsWith("stop/"));
  return [stack("Time of a step by phase", SHARED, "time/step_s", after), stack("How episodes end", stops, "", after)];
}

/** A table of evaluations for each recipe: means over its runs, with intervals. */
function evaluations(data) {
  const names = Object.keys(data.curves).filter(
    (name) => name.startsWith("eval/") && !/\/(episodes|failed)$/.test(name) && data.constants[name] === undefined,
  );
  if (!names.length) return null;
  const rank = (name) => ["success", "score", "pass@", "reward"].findIndex((word) => name.includes(word)) % 9;
  names.sort((a, b) => ((rank(a) + 9) % 9) - ((rank(b) + 9) % 9) || a.length - b.length);
  const tables = data.recipes.map((recipe, index) => {
    const curves = names.map((name) => data.curves[name].find((curve) => curve.color === index));
    const steps = [...new Set(curves.flatMap((curve) => curve?.steps ?? []))].sort((a, b) => a - b);
    const rows = steps.map((step) => [
      step === 0 ? "before step 1" : String(step),
      ...curves.map((curve, place) => {
        const at = curve ? curve.steps.indexOf(step) : -1;
        if (at < 0) return "–";
        const mean = shown(curve.mean[at], names[place]);
        const [low, high] = [curve.low?.[at] ?? null, curve.high?.[at] ?? null];
        if (low === null || low === high) return mean;
        return `${mean} [${shown(low, names[place])}, ${shown(high, names[place])}]`;
      }),
    ]);
    const of = data.recipes.length > 1 ? recipe.name : "Means over the evaluation tasks";
    const means = `means of ${recipe.runs.length} runs, or of those that got there, with 95 % intervals`;
    const caption = recipe.runs.length > 1 ? `${of} (${means})` : of;
    return table(
      caption,
      [{ name: "step" }, ...names.map((name) => ({ name: nameOf(name.replace("eval/", "")), numeric: true }))],
      rows,
    );
  });
  return [el("h2", {}, "Evaluations"), tables];
}

const CONSTANT = "The same in every step";

/** Every metric, by family, with a picker, which stays as it is where `update(data)` draws the figures again. */
function metricsPanel() {
  const status = el("output", { class: "muted" });
  const filter = el("input", {
    type: "search",
    class: "search",
    placeholder: "Filter metrics",
    "aria-label": "Filter metrics by name",
    oninput: choose,
  });
  const family = el("select", { "aria-label": "Family of metrics", onchange: choose });
  const figures = el("div");

  function update(data) {
    const before = family.value;
    family.replaceChildren(
      el("option", { value: "" }, "All families"),
      ...data.families.map((each) => el("option", { value: each.name }, each.name)),
      el("option", { value: CONSTANT }, CONSTANT),
    );
    family.value = [...family.options].some((each) => each.value === before) ? before : "";
    const legend = data.recipes.length > 1 || data.runs.length > 1 ? [legendOfRuns(data)] : [];
    const still = Object.entries(data.constants);
    figures.replaceChildren(
      ...legend,
      ...data.families.map((each) => sectionOf(each, data)),
      ...(still.length ? [constantsOf(still)] : []),
    );
    choose();
  }

  function sectionOf({ name: family, metrics }, data) {
    const made = metrics.map((name) => {
      const figure = metricChart(name, data);
      figure.dataset.name = `${name} ${nameOf(name)}`.toLowerCase();
      return figure;
    });
    return el(
      "section",
      { "aria-label": family, "data-family": family },
      el("h2", {}, family),
      el("div", { class: "grid" }, made),
    );
  }

  /** Metrics of one value in every step, as a list. */
  function constantsOf(constants) {
    const made = constants.map(([name, value]) =>
      el(
        "div",
        { "data-name": `${name} ${nameOf(name)}`.toLowerCase() },
        el("dt", {}, plain(nameOf(name)), " ", el("code", { class: "metric" }, plain(name))),
        el("dd", {}, shown(value, name)),
      ),
    );
    return el(
      "section",
      { "aria-label": CONSTANT, "data-family": CONSTANT },
      el("h2", {}, CONSTANT),
      el("dl", { class: "constants" }, made),
    );
  }

  function choose() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let num = 0;
    for (const section of figures.querySelectorAll("section")) {
      const isChosen = !family.value || section.dataset.family === family.value;
      let any = false;
      for (const figure of section.querySelectorAll("[data-name]")) {
        const fits = isChosen && words.every((word) => figure.dataset.name.includes(word));
        figure.hidden = !fits;
        any ||= fits;
        num += fits;
      }
      section.hidden = !any;
    }
    status.replaceChildren(count(num, "metric"));
  }
  const panel = [el("div", { class: "toolbar", role: "search" }, filter, family, smoothingControl(), status), figures];
  return { panel, update };
}

/** Warnings, faults, and what of the folder could not be read. */
function warningsPanel(data) {
  const of = (number) => data.runs[number].name;
  const parts = [];
  if (data.notices.length)
    parts.push(
      el("h2", {}, "Not shown"),
      el(
        "ul",
        { class: "plain" },
        data.notices.map((words) => el("li", {}, plain(words))),
      ),
    );
  if (data.warnings.length) {
    const rows = data.warnings.map((warning) => [
      String(warning.step),
      of(warning.run),
      warning.name,
      el("span", { class: "words" }, plain(warning.words)),
    ]);
    parts.push(
      el("h2", {}, "Warnings"),
      table(
        "Warnings, in the order in which they were told",
        [{ name: "step" }, { name: "run" }, { name: "sign" }, { name: "what it says" }],
        rows,
      ),
    );
  }
  if (data.faults.length) {
    const rows = data.faults.map((fault) => [plain(fault.kind), of(fault.run), String(fault.kept)]);
    parts.push(
      el("h2", {}, "Faults of the environment"),
      table(
        "Kinds of faults; their episodes are among the rollouts",
        [{ name: "kind" }, { name: "run" }, { name: "episodes kept", numeric: true }],
        rows,
      ),
    );
  }
  return parts.length ? parts : [el("p", { class: "muted" }, "No warnings, and no faults of the environment.")];
}

/** The recipe of each run: what differs from the defaults, then every field. */
function recipePanel(data) {
  const part = (words, text, open) =>
    el("details", { open }, el("summary", {}, words), el("pre", {}, plain(text.trim() === "{}" ? "nothing" : text)));
  return data.runs.map((run) =>
    el(
      "section",
      { class: "card recipe", "aria-label": plain(run.name) },
      el("h2", {}, plain(`${run.name}, seed ${run.seed}`)),
      run.changed !== null && part("Different from the defaults", run.changed, true),
      part("Every field", run.config, run.changed === null),
    ),
  );
}
