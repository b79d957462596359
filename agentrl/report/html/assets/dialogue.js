"use strict";
/* One rollout, its group side by side, and its group as a tree; sampled tokens coloured by what is known of them. */

/** By what tokens can be coloured: how a value is read of a turn, what its scale is, and what the legend says of its ends. */
const COLORINGS = {
  advantage: { label: "advantage", column: "advantage", scale: "diverging", ends: ["worse", "better"] },
  ratio: {
    label: "importance ratio",
    column: "ratio",
    scale: "ratio",
    ends: ["now less likely", "now more likely"],
  },
  probability: { label: "probability", column: "logprob", scale: "unlikely", ends: ["1", "0"], of: Math.exp },
  entropy: { label: "entropy", column: "entropy", scale: "amount", ends: ["", ""] },
  entropies: { label: "entropy when credited", column: "entropies", scale: "amount", ends: ["", ""] },
  version: { label: "policy version", column: "version", scale: "range", ends: ["oldest", "newest"] },
  clipped: { label: "clipping", column: "clipped", scale: "flag", ends: ["", "clipped"] },
  values: { label: "critic's value", column: "values", scale: "diverging", ends: ["low", "high"] },
};

/** What the turns of rollouts have to be coloured by: `[{key, label, group}]`. */
function coloringsOf(rollouts) {
  const turns = rollouts.flatMap((rollout) => rollout.turns);
  const has = (column) => turns.some((turn) => turn.columns[column] !== undefined);
  const known = Object.entries(COLORINGS).filter(([, { column }]) => has(column));
  const columns = new Set(known.map(([, { column }]) => column));
  const further = new Set(
    turns.flatMap((turn) => Object.keys(turn.columns)).filter((name) => name !== "keep" && !columns.has(name)),
  );
  const others = new Set(turns.flatMap((turn) => Object.keys(turn.others)));
  return [
    ...known.map(([key, { label }]) => ({ key, label, group: "As trained" })),
    ...[...further].map((name) => ({ key: `column:${name}`, label: name.replaceAll("_", " "), group: "As trained" })),
    ...[...others].map((name) => ({ key: `other:${name}`, label: name, group: "Advantage under another scheme" })),
  ];
}

function valuesOf(turn, key) {
  const coloring = COLORINGS[key];
  const name = key.slice(key.indexOf(":") + 1);
  const values = coloring
    ? turn.columns[coloring.column]
    : key.startsWith("other:")
      ? turn.others[name]
      : turn.columns[name];
  const at = (index) => (Array.isArray(values) ? values[index] : values) ?? null;
  return (index) => (coloring?.of && at(index) !== null ? coloring.of(at(index)) : at(index));
}

/** How values become colours: over all turns that are shown together, so that colours can be compared. */
function scaleOf(rollouts, key) {
  const { scale, ends } = COLORINGS[key] ?? { scale: "diverging", ends: ["worse", "better"] };
  let [low, high] = [Infinity, -Infinity];
  for (const turn of rollouts.flatMap((rollout) => rollout.turns)) {
    const value = valuesOf(turn, key);
    for (let index = 0; index < turn.pieces.length; index += 1) {
      const each = value(index);
      if (each !== null) [low, high] = [Math.min(low, each), Math.max(high, each)];
    }
  }
  if (low > high) [low, high] = [0, 0];
  const most = Math.max(Math.abs(low), Math.abs(high));
  const spread = Math.max(Math.abs(Math.log(Math.max(low, 1e-9))), Math.abs(Math.log(Math.max(high, 1e-9))));
  const sided = (share) => ({ side: share < 0 ? "negative" : "positive", share: Math.abs(share) });
  const shares = {
    diverging: (value) => sided(most > 0 ? value / most : 0),
    ratio: (value) => sided(spread > 0 ? Math.log(Math.max(value, 1e-9)) / spread : 0),
    unlikely: (value) => ({ side: "amount", share: 1 - value }),
    amount: (value) => ({ side: "amount", share: high > 0 ? value / high : 0 }),
    range: (value) => ({ side: "amount", share: high > low ? (value - low) / (high - low) : 0 }),
    flag: (value) => ({ side: "flag", share: value ? 1 : 0 }),
  };
  const middle = { diverging: "0", ratio: "1" }[scale];
  const bound = { diverging: [-most, most], ratio: [low, high], amount: [0, high], range: [low, high] }[scale];
  return { share: shares[scale], kind: scale, ends, bound, middle };
}

/** What colours mean. */
function scaleLegend(scale, rollouts) {
  const isLeftOut = (turn) => [turn.columns.keep].flat().includes(0);
  const struck =
    rollouts.some((rollout) => rollout.turns.some(isLeftOut)) &&
    el("span", { class: "muted" }, el("s", {}, "left out"), " of the loss");
  const bar = el("i", { class: `bar ${scale.kind}`, "aria-hidden": "true" });
  const [left, right] = scale.ends.map((word, index) =>
    [scale.bound && shown(scale.bound[index]), word].filter(Boolean).join(" "),
  );
  if (scale.bound && scale.bound[0] === scale.bound[1])
    return el("p", { class: "scale" }, `${shown(scale.bound[1])} for every token`, struck);
  if (scale.kind === "flag") return el("p", { class: "scale" }, bar, " clipped", struck);
  return el("p", { class: "scale" }, el("span", {}, left), bar, el("span", {}, right), struck);
}

/** The tokens of a turn, coloured; `inspect` is told of the one under the pointer. */
function tokensOf(turn, key, scale, place) {
  const value = valuesOf(turn, key);
  const keep = valuesOf(turn, "column:keep");
  const box = el("div", { class: "tokens", "data-turn": place });
  turn.pieces.forEach((piece, index) => {
    const text = plain(piece).replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
    const token = el("span", { class: "token", "data-token": index }, text || "∅");
    const each = value(index);
    if (each !== null) tint(token, scale.share(each));
    if (keep(index) === 0) token.classList.add("left-out");
    box.append(token);
  });
  return box;
}

/** One message that the model read. */
function messageOf(said) {
  const role = said.name ? `${said.role} ${said.name}` : said.role;
  const isError = said.role === "tool" && said.text.startsWith("Error:");
  return el(
    "article",
    {
      class: `message role-${["system", "user", "tool"].includes(said.role) ? said.role : "other"}${isError ? " error" : ""}`,
    },
    el("h4", {}, plain(role)),
    said.thought && el("pre", { class: "muted" }, plain(said.thought)),
    el("pre", {}, plain(said.text)),
    said.calls && callsOf(said.calls),
  );
}

/** Tool calls, each on its line. */
function callsOf(calls, attributes = {}) {
  return el(
    "ul",
    { class: "calls", ...attributes },
    calls.split("\n").map((call) => el("li", {}, el("code", {}, plain(call)))),
  );
}

let areTokensOpen = false;

/** An action: its tokens; if it calls tools, what it said and called, with the tokens one click away. */
function actionOf(turn, key, scale, place) {
  const tokens = tokensOf(turn, key, scale, place);
  if (!turn.said) return tokens;
  const value = valuesOf(turn, key);
  const values = turn.pieces.map((_, index) => value(index)).filter((each) => each !== null);
  const calls = callsOf(turn.said.calls);
  if (values.length) tint(calls, scale.share(values.reduce((sum, each) => sum + each, 0) / values.length));
  const raw = el("details", { class: "raw" }, el("summary", {}, count(turn.pieces.length, "token")), tokens);
  raw.open = areTokensOpen;
  raw.addEventListener("toggle", () => (areTokensOpen = raw.open)); // so for what is looked at next
  return [
    turn.said.thought && el("pre", { class: "muted" }, plain(turn.said.thought)),
    turn.said.text.trim() && el("pre", {}, plain(turn.said.text)),
    calls,
    raw,
  ];
}

function tint(element, { side, share }) {
  if (share <= 0.004) return;
  element.classList.add(side);
  element.style.setProperty("--share", String(Math.min(1, share)));
}

/** What the model really read before its first turn: system text, tools and control tokens, as the template wrote them. */
function contextOf(text) {
  return el("details", { class: "context" }, el("summary", {}, "As the template wrote it"), el("pre", {}, plain(text)));
}

/** All that was said in a rollout, to search in. */
function saidIn(rollout) {
  const ofTurn = (turn) => [...turn.read.map((said) => `${said.text} ${said.calls ?? ""}`), turn.pieces.join(""), turn.said?.calls ?? ""];
  return [rollout.error, ...rollout.turns.flatMap(ofTurn)].join("\n").toLowerCase();
}

function turnNotes(turn, number, key) {
  const components = Object.entries(turn.components).filter(
    ([name]) => name !== "reward" || Object.keys(turn.components).length > 1,
  );
  const value = valuesOf(turn, key);
  const values = turn.pieces.map((_, index) => value(index)).filter((each) => each !== null);
  const mean = values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
  const label = COLORINGS[key]?.label ?? key.slice(key.indexOf(":") + 1).replaceAll("_", " ");
  const parts = [
    `turn ${number}`,
    `reward ${shown(turn.reward)}${components.length ? ` (${components.map(([name, amount]) => `${name} ${shown(amount)}`).join(", ")})` : ""}`,
    mean !== null &&
      `${label} ${key === "advantage" || key.startsWith("other:") ? signed(mean) : shown(mean)}${new Set(values).size > 1 ? " on average" : ""}`,
    ...Object.entries(turn.signals).map(([name, each]) => `${name.replaceAll("_", " ")} ${shown(each)}`),
    turn.finish !== "stop" && `ended by ${turn.finish}`,
    turn.branches?.length &&
      `forks earned ${turn.branches.map((rewards) => shown(rewards.reduce((sum, each) => sum + each, 0))).join(", ")}`,
    turn.state !== null && `state ${turn.state}`,
    turn.dialect && `dialect ${turn.dialect}`,
    turn.ignored.length > 0 && `not taken over: ${turn.ignored.join(", ")}`,
  ];
  return el("p", { class: "notes" }, plain(parts.filter(Boolean).join(" · ")));
}

/** The calls of an agent's session: a row for each in the order asked, a lane for each line of calls. */
function callsMapOf(rollout) {
  const { turns } = rollout;
  const lanes = 1 + Math.max(...turns.map((turn) => turn.lane ?? -1));
  if (!lanes) return null; // each continues the one before
  const last = turns.map((_, index) => index);
  const ends = Array.from({ length: lanes }, (_, lane) => last.filter((index) => turns[index].lane === lane).at(-1));
  const begins = Array.from({ length: lanes }, (_, lane) => turns.findIndex((turn) => turn.lane === lane));
  const rows = turns.map((turn, index) => {
    const cells = Array.from({ length: lanes }, (_, lane) =>
      el(
        "td",
        { class: `lane${begins[lane] < index && index <= ends[lane] ? " above" : ""}${begins[lane] <= index && index < ends[lane] ? " below" : ""}` },
        lane === turn.lane && el("span", { class: `call ${turn.kind}` }, `${index + 1}`),
      ),
    );
    const words = plain(turn.said ? `${turn.said.text} ${turn.said.calls}` : turn.pieces.join("")).trim().replace(/\s+/g, " ");
    return el(
      "tr",
      {},
      cells,
      el("td", {}, plain([turn.agent, turn.relation].filter(Boolean).join(" · "))),
      el(
        "td",
        {},
        turn.difference && el("small", {}, plain(`first difference: ${turn.difference}`)),
        turn.ignored.length > 0 && el("small", {}, plain(`not taken over: ${turn.ignored.join(", ")}`)),
        el("code", {}, words.length > 120 ? `${words.slice(0, 120)}…` : words),
      ),
    );
  });
  return el(
    "details",
    { class: "calls-map", open: "" },
    el("summary", {}, `${count(turns.length, "call")} in ${count(lanes, "line")}`),
    el("table", { "aria-label": "Calls of the agent" }, el("tbody", {}, rows)),
  );
}

/** A whole rollout, as a dialogue. */
function dialogueOf(rollout, at, key, scale, { skip = 0 } = {}) {
  const parts = rollout.turns.map((turn, index) => [
    turn.rewrites &&
      index > 0 &&
      !turn.kind &&
      el("p", { class: "rewritten" }, "The history was rewritten here; this turn has a context of its own."),
    turn.kind && el("p", { class: "rewritten" }, plain(`This call ${turn.relation}${turn.difference ? `; ${turn.difference}` : ""}.`)),
    !turn.kind && turn.parent !== null && el("p", { class: "notes" }, `after turn ${turn.parent + 1}`),
    turn.context && contextOf(turn.context),
    turn.read.slice(index === 0 ? skip : 0).map(messageOf),
    el(
      "article",
      { class: "message role-assistant" },
      el("h4", {}, plain(turn.agent || "assistant")),
      actionOf(turn, key, scale, index),
      turnNotes(turn, index + 1, key),
    ),
  ]);
  return el(
    "div",
    { class: "dialogue", "data-at": at },
    callsMapOf(rollout),
    parts,
    rollout.error &&
      el("article", { class: "message error" }, el("h4", {}, "error"), el("pre", {}, plain(rollout.error))),
    rollout.traceback &&
      el("article", { class: "message error" }, el("h4", {}, "traceback"), el("pre", {}, plain(rollout.traceback))),
    rollout.gold && el("p", { class: "notes" }, plain(`known answer: ${rollout.gold}`)),
  );
}

/** The rollouts of a group side by side, each a column. */
function groupOf(rollouts, entries, key, scale, chosen, select) {
  const first = JSON.stringify(rollouts[0]?.turns[0]?.read);
  const isAlike = rollouts.every((rollout) => JSON.stringify(rollout.turns[0]?.read) === first);
  const isShared = first !== undefined && rollouts.length > 1 && isAlike; // undefined: of one that never began
  const shared = isShared ? rollouts[0].turns[0].read : [];
  const columns = rollouts.map((rollout, index) =>
    el(
      "section",
      {
        class: "column",
        "aria-label": `rollout ${entries[index].id}`,
        "aria-current": index === chosen ? "true" : null,
      },
      el(
        "button",
        { class: "head", onclick: () => select(entries[index]) },
        el("strong", {}, `reward ${shown(entries[index].reward)}`),
        el("span", {}, plain(`${tail(entries[index].id)} · ${entries[index].stop.replaceAll("_", " ")}`)),
      ),
      dialogueOf(rollout, index, key, scale, { skip: shared.length }),
    ),
  );
  return el(
    "div",
    { class: "group" },
    shared.map(messageOf),
    el(
      "div",
      { class: "columns", tabindex: "0", role: "region", "aria-label": "Rollouts of the group, side by side" },
      columns,
    ),
  );
}

const tail = (id) => `…/${id.split("/").at(-1)}`;

/** A group as a tree: rollouts share a branch as long as they say the same; forks of a turn hang where they left. */
function treeOf(rollouts, entries, select) {
  const root = { children: new Map(), members: [] };
  rollouts.forEach((rollout, index) => {
    let node = root;
    node.members.push(index);
    rollout.turns.forEach((turn, depth) => {
      const words = JSON.stringify([turn.read, turn.pieces]);
      if (!node.children.has(words))
        node.children.set(words, { turn, depth, children: new Map(), members: [], forks: [] });
      node = node.children.get(words);
      node.members.push(index);
      for (const rewards of turn.branches ?? []) node.forks.push(rewards.reduce((sum, each) => sum + each, 0));
    });
    (node.ends ??= []).push(index);
  });
  const mean = (members) => members.reduce((sum, index) => sum + (entries[index].reward ?? 0), 0) / members.length;
  const draw = (node) => {
    const { said, pieces } = node.turn;
    const words = plain(said ? `${said.text} ${said.calls}` : pieces.join("")).trim().replace(/\s+/g, " ");
    const of =
      node.members.length > 1 ? `${node.members.length} rollouts, mean reward ${shown(mean(node.members))}` : "";
    return el(
      "li",
      {},
      el(
        "div",
        { class: "node" },
        el("small", {}, `turn ${node.depth + 1}${of && ` · ${of}`}`),
        el("code", {}, words.length > 240 ? `${words.slice(0, 240)}…` : words),
      ),
      el(
        "ul",
        {},
        node.forks.length > 0 &&
          el(
            "li",
            {},
            el(
              "div",
              { class: "node fork" },
              `${count(node.forks.length, "fork")} before this turn earned ${node.forks.map((each) => shown(each)).join(", ")}`,
            ),
          ),
        [...node.children.values()].map(draw),
        (node.ends ?? []).map(leaf),
      ),
    );
  };
  const leaf = (index) =>
    el(
      "li",
      {},
      el(
        "button",
        { class: "leaf", onclick: () => select(entries[index]) },
        plain(
          `${tail(entries[index].id)} · reward ${shown(entries[index].reward)} · ${entries[index].stop.replaceAll("_", " ")}`,
        ),
      ),
    );
  const read = rollouts.find((rollout) => rollout.turns.length)?.turns[0].read ?? [];
  return el(
    "div",
    { class: "tree" },
    read.map(messageOf),
    el(
      "ul",
      { "aria-label": "Turns of the group as a tree" },
      [...root.children.values()].map(draw),
      (root.ends ?? []).map(leaf),
    ),
  );
}
