"use strict";
/* The list of rollouts, of which only the visible rows are in the page, and the one that is looked at. */

const ROW_HEIGHT = 62;
const ORDERS = {
  failures: [
    "Failures first",
    (a, b) => b.failed - a.failed || a.reward - b.reward || b.toolErrors - a.toolErrors || b.step - a.step,
  ],
  newest: ["Newest first", (a, b) => b.step - a.step],
  best: ["Best first", (a, b) => b.reward - a.reward],
  longest: ["Longest first", (a, b) => b.tokens - a.tokens],
};

/** The panel of rollouts: `load(block)` gives the rollouts of a block. It has `update(data)` and `move(by)`. */
function rolloutsPanel(data, load) {
  const state = { entries: [], shown: [], current: null, view: "dialogue", key: "advantage", found: null, asked: 0 };
  const blocks = new Map();

  async function blockOf(number) {
    if (!blocks.has(number)) {
      const block = load(number);
      blocks.set(number, block);
      block.catch(() => blocks.delete(number)); // asked again when it is looked at again
      if (blocks.size > 12) blocks.delete(blocks.keys().next().value);
    }
    return blocks.get(number);
  }

  /* Search and filters */
  const search = el("input", {
    type: "search",
    class: "search",
    placeholder: "Search (press /)",
    "aria-label": "Search rollouts; Enter searches what was said",
    oninput: refilter,
    onkeydown: (event) => event.key === "Enter" && searchInside(),
  });
  const choice = (label, options) =>
    el(
      "select",
      { "aria-label": label, onchange: refilter },
      options.map(([value, text]) => el("option", { value }, plain(text))),
    );
  const order = choice(
    "Order",
    Object.entries(ORDERS).map(([key, [label]]) => [key, label]),
  );
  const ending = choice("Error", [
    ["", "Errors or none"],
    ["failed", "Failed"],
    ["tool", "Tool errors"],
    ["none", "No errors"],
  ]);
  const stop = choice("Stop reason", []);
  const tool = choice("Tool", []);
  const split = choice("Split", []);
  const run = choice("Run", []);
  const step = choice("Step", []);
  const bound = (label) =>
    el("input", { type: "number", step: "any", placeholder: label, "aria-label": label, oninput: refilter });
  const [low, high] = [bound("Reward from"), bound("Reward to")];
  const status = el("output", { class: "muted" });

  function fill(select, all, values) {
    const before = select.value;
    select.replaceChildren(
      el("option", { value: "" }, all),
      ...values.map(([value, text]) => el("option", { value }, plain(text))),
    );
    select.value = values.some(([value]) => String(value) === before) ? before : "";
    select.hidden = values.length < (select === tool ? 1 : 2);
  }

  function update(next) {
    data = next;
    state.entries = data.rollouts;
    const distinct = (of) => [...new Set(state.entries.flatMap(of))].sort((a, b) => (a < b ? -1 : 1));
    fill(
      stop,
      "Any stop reason",
      distinct((entry) => entry.stop).map((value) => [value, value.replaceAll("_", " ")]),
    );
    fill(
      split,
      "Any split",
      distinct((entry) => entry.split).map((value) => [value, value === "eval" ? "Evaluation" : "Training"]),
    );
    fill(
      tool,
      "Any tool",
      distinct((entry) => entry.tools).map((value) => [value, value]),
    );
    fill(
      step,
      "Any step",
      distinct((entry) => entry.step)
        .sort((a, b) => a - b)
        .map((value) => [value, `Step ${value}`]),
    );
    fill(
      run,
      "Any run",
      data.runs.map((each, number) => [number, each.name]),
    );
    filter();
  }

  /** Filter as the reader asks for, and begin at the top again. */
  function refilter() {
    state.current = null;
    scroller.scrollTop = 0;
    filter();
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (state.found?.query !== search.value) state.found = null;
    const says = (entry) => {
      const text =
        `${entry.id} ${entry.task} ${entry.last} ${entry.error} ${entry.tools.join(" ")} ${entry.stop}`.toLowerCase();
      return words.every((word) => text.includes(word)) || state.found?.entries.has(nameOf(entry));
    };
    const isWithin = (entry) =>
      (low.value === "" || entry.reward >= Number(low.value)) &&
      (high.value === "" || entry.reward <= Number(high.value));
    const ends = {
      "": () => true,
      failed: (entry) => entry.failed,
      tool: (entry) => entry.toolErrors > 0,
      none: (entry) => !entry.failed && !entry.toolErrors,
    };
    state.shown = state.entries
      .filter(
        (entry) =>
          (!split.value || entry.split === split.value) &&
          (!stop.value || entry.stop === stop.value) &&
          (!tool.value || entry.tools.includes(tool.value)),
      )
      .filter(
        (entry) =>
          (!run.value || entry.run === Number(run.value)) && (!step.value || entry.step === Number(step.value)),
      )
      .filter((entry) => isWithin(entry) && ends[ending.value](entry) && (!words.length || says(entry)))
      .sort(ORDERS[order.value][1]);
    const kept = state.shown.findIndex((entry) => state.current && nameOf(entry) === nameOf(state.current));
    if (kept >= 0) state.current = state.shown[kept]; // news has entries of its own
    status.replaceChildren(
      `${state.shown.length.toLocaleString("en")} of ${state.entries.length.toLocaleString("en")}`,
    );
    list.style.setProperty("--rows", String(state.shown.length));
    rows();
    if (kept < 0 && state.shown.length) select(state.shown[0], { scroll: false });
    if (!state.shown.length)
      pane.replaceChildren(
        el(
          "p",
          { class: "muted empty" },
          state.entries.length ? "No rollout fits these filters." : "No rollouts were recorded yet.",
        ),
      );
  }

  /** Look through what was said, block by block; each find joins the list as it comes. */
  async function searchInside() {
    const query = search.value;
    const asked = (state.asked += 1);
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return;
    state.found = { query, entries: new Set() };
    const numbers = [...new Set(state.entries.map((entry) => entry.block))];
    for (const [done, number] of numbers.entries()) {
      const rollouts = await load(number);
      if (asked !== state.asked || state.found?.query !== query) return;
      const isIn = rollouts.map((rollout) => words.every((word) => saidIn(rollout).includes(word)));
      const found = state.entries.filter((entry) => entry.block === number && isIn[entry.at]);
      found.forEach((entry) => state.found.entries.add(nameOf(entry)));
      if (found.length) filter();
      status.replaceChildren(`searched ${done + 1} of ${numbers.length}, found ${state.shown.length}`);
    }
  }

  const nameOf = (entry) => `${entry.block}/${entry.at}`;

  /* The list: a window onto rows of equal height */
  const list = el("div", { class: "rows" });
  const scroller = el(
    "div",
    {
      class: "list",
      role: "listbox",
      tabindex: "0",
      "aria-label": "Rollouts",
      onscroll: () => requestAnimationFrame(rows),
      onkeydown: onKey,
    },
    list,
  );

  function rows() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(state.shown.length, first + Math.ceil((scroller.clientHeight || 800) / ROW_HEIGHT) + 9);
    list.replaceChildren(...state.shown.slice(first, last).map((entry, index) => row(entry, first + index)));
    const place = state.shown.indexOf(state.current);
    if (place >= first && place < last) scroller.setAttribute("aria-activedescendant", `row-${place}`);
    else scroller.removeAttribute("aria-activedescendant");
  }

  function row(entry, place) {
    const isCurrent = entry === state.current;
    const mood = entry.failed ? "bad" : entry.success === true ? "good" : entry.success === false ? "missed" : "";
    const facts = [
      `step ${entry.step}`,
      `${entry.turns} turns`,
      entry.stop === "terminated" ? "" : entry.stop.replaceAll("_", " "),
      entry.toolErrors ? count(entry.toolErrors, "tool error") : "",
    ];
    const made = el(
      "div",
      {
        id: `row-${place}`,
        class: "row",
        role: "option",
        "aria-selected": String(isCurrent),
        "aria-setsize": state.shown.length,
        "aria-posinset": place + 1,
        onclick: () => select(entry),
      },
      el(
        "span",
        { class: `reward ${mood}` },
        shown(entry.reward === null ? null : Number(entry.reward.toPrecision(3))),
      ),
      el("span", { class: "task" }, plain(entry.task || entry.id)),
      el("small", { class: entry.failed ? "bad" : "" }, plain(facts.filter(Boolean).join(" · "))),
    );
    made.style.setProperty("--place", String(place));
    return made;
  }

  function onKey(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    move(by);
  }

  function move(by) {
    const place = state.shown.indexOf(state.current);
    const next = Math.min(state.shown.length - 1, Math.max(0, place + by));
    if (state.shown[next]) select(state.shown[next]);
  }

  /* What is looked at */
  const pane = el("section", { class: "pane", "aria-label": "Rollout", tabindex: "-1" });
  const inspector = el("output", { class: "inspector", "aria-live": "polite" });

  async function select(entry, { scroll = true } = {}) {
    const isOther = state.current !== entry;
    state.current = entry;
    if (scroll) {
      const top = state.shown.indexOf(entry) * ROW_HEIGHT;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + ROW_HEIGHT > scroller.scrollTop + scroller.clientHeight)
        scroller.scrollTop = top + ROW_HEIGHT - scroller.clientHeight;
    }
    rows();
    const rollouts = await blockOf(entry.block);
    if (state.current && nameOf(state.current) === nameOf(entry)) look(entry, rollouts, isOther);
  }

  function look(entry, rollouts, isOther) {
    const entries = state.entries.filter((each) => each.block === entry.block).sort((a, b) => a.at - b.at);
    const colorings = coloringsOf(rollouts);
    const chosen = colorings.some(({ key }) => key === state.key) ? state.key : (colorings[0]?.key ?? "advantage");
    const scale = scaleOf(state.view === "dialogue" ? [rollouts[entry.at]] : rollouts, chosen);
    const again = () => look(entry, rollouts, false);
    const colorBy = el(
      "select",
      { onchange: () => ((state.key = colorBy.value), again()) },
      [...new Set(colorings.map(({ group }) => group))].map((group) =>
        el(
          "optgroup",
          { label: group },
          colorings
            .filter((each) => each.group === group)
            .map(({ key, label }) => el("option", { value: key }, plain(label))),
        ),
      ),
    );
    colorBy.value = chosen;
    const views = { dialogue: "Dialogue", group: `Group of ${rollouts.length}`, tree: "Tree" };
    const buttons = Object.entries(views).map(([view, label]) =>
      el(
        "button",
        { "aria-pressed": String(view === state.view), onclick: () => ((state.view = view), again()) },
        label,
      ),
    );
    const body = {
      dialogue: () => dialogueOf(rollouts[entry.at], entry.at, chosen, scale),
      group: () => groupOf(rollouts, entries, chosen, scale, entry.at, select),
      tree: () => treeOf(rollouts, entries, select),
    }[state.view]();
    inspector.replaceChildren("Point at a token for its numbers.");
    pane.replaceChildren(
      el(
        "header",
        {},
        heading(entry, rollouts[entry.at]),
        el(
          "div",
          { class: "toolbar" },
          el("div", { class: "views", role: "group", "aria-label": "View" }, buttons),
          state.view !== "tree" && el("label", {}, "colour by ", colorBy),
        ),
        state.view !== "tree" && scaleLegend(scale, rollouts),
      ),
      body,
      inspector,
    );
    pane.onpointerover = pane.onclick = (event) => inspect(event.target, rollouts);
    if (isOther) pane.scrollTop = 0;
  }

  function heading(entry, rollout) {
    const facts = [
      `reward ${shown(entry.reward)}`,
      entry.success === null ? "" : entry.success ? "success" : "no success",
      entry.stop.replaceAll("_", " "),
      `${entry.turns} turns, ${entry.tokens.toLocaleString("en")} tokens`,
      `step ${entry.step}`,
      data.runs.length > 1 ? data.runs[entry.run].name : "",
      rollout.env,
      `task seed ${rollout.seed}`,
    ];
    return [el("h2", {}, plain(entry.id)), el("p", { class: "muted" }, plain(facts.filter(Boolean).join(" · ")))];
  }

  /** Tell what is known of a token. */
  function inspect(target, rollouts) {
    const token = target.closest?.(".token");
    if (!token) return;
    const rollout = rollouts[Number(token.closest(".dialogue").dataset.at)];
    pane.querySelector(".token.looked-at")?.classList.remove("looked-at");
    token.classList.add("looked-at");
    const turn = rollout.turns[Number(token.parentElement.dataset.turn)];
    const index = Number(token.dataset.token);
    const facts = coloringsOf([rollout])
      .map(({ key, label }) => [label, valuesOf(turn, key)(index)])
      .filter(([, value]) => value !== null);
    if (valuesOf(turn, "column:keep")(index) === 0) facts.push(["in the loss", "no"]);
    inspector.replaceChildren(
      el("code", {}, `“${plain(turn.pieces[index])}”`),
      ...facts.map(([label, value]) =>
        el("span", {}, `${plain(label)} `, el("b", {}, typeof value === "number" ? shown(value) : String(value))),
      ),
    );
  }

  const panel = el(
    "div",
    { class: "rollouts" },
    el(
      "div",
      { class: "filters", role: "search" },
      search,
      el(
        "details",
        { class: "more", open: innerWidth > 900 },
        el("summary", {}, "Filters"),
        el(
          "div",
          { class: "fields" },
          order,
          split,
          ending,
          stop,
          tool,
          run,
          step,
          el("div", { class: "bounds" }, low, high),
        ),
      ),
      status,
    ),
    scroller,
    pane,
  );
  return {
    panel: [panel],
    update,
    move,
    show: rows,
  };
}
