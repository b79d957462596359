"use strict";
/* The report: tabs over the panels, keys, and, where it is served, news. */

const POLL_MS = 2000;
const QUIET_MINUTES = 10;

/** What becomes of the runs: finished, live, or when the last step was taken. */
function stateOf(data) {
  if (data.runs.every((run) => run.finished)) return "finished";
  if (!data.live) return null;
  const written = data.runs.map((run) => run.written).filter((each) => each !== null);
  const minutes = written.length ? (Date.now() / 1000 - Math.max(...written)) / 60 : 0;
  if (minutes < QUIET_MINUTES) return "live";
  const [number, unit] = minutes < 120 ? [minutes, "minute"] : minutes < 2880 ? [minutes / 60, "hour"] : [minutes / 1440, "day"];
  return `last step ${count(Math.round(number), unit)} ago`;
}

function startReport() {
  let data = pageData();
  smoothing.weight = 0.6;
  const load = async (number) =>
    JSON.parse(data.live ? await (await fetch(`blocks/${number}`)).text() : await blockText(number));
  const rollouts = rolloutsPanel(data, load);
  /* Of panels with controls the controls stay, as the reader left them; the others are made again when there is news. */
  const panels = {
    overview: { label: () => "Overview", make: () => overviewPanel(data, open) },
    metrics: { label: () => "Metrics", ...metricsPanel() },
    rollouts: { label: () => `Rollouts ${data.rollouts.length.toLocaleString("en")}`, ...rollouts },
    warnings: {
      label: () => `Warnings ${data.warnings.length + data.faults.length + data.notices.length}`,
      make: () => warningsPanel(data),
    },
    recipe: { label: () => "Recipe", panel: recipePanel(data), update: () => {} },
  };
  const page = document.getElementById("page");
  const header = el("header", { class: "top" });
  const tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the report", onkeydown: onTabKey });
  const made = new Set();
  let current = null;
  document.body.prepend(header);

  for (const [name, panel] of Object.entries(panels)) {
    panel.tab = el("button", {
      id: `tab-${name}`,
      role: "tab",
      "aria-controls": `panel-${name}`,
      onclick: () => open(name),
    });
    panel.box = el("section", {
      id: `panel-${name}`,
      role: "tabpanel",
      "aria-labelledby": `tab-${name}`,
      hidden: true,
    });
    panel.box.append(...(panel.panel ?? []));
    tabs.append(panel.tab);
    page.append(panel.box);
  }

  function open(name) {
    current = name;
    for (const [each, panel] of Object.entries(panels)) {
      panel.tab.setAttribute("aria-selected", String(each === name));
      panel.tab.tabIndex = each === name ? 0 : -1;
      panel.box.hidden = each !== name;
    }
    document.body.dataset.tab = name;
    if (!made.has(name)) {
      made.add(name);
      const { box, make, update } = panels[name];
      if (update) update(data);
      else box.replaceChildren(...make().flat(Infinity).filter(Boolean));
    }
    if (name === "rollouts") rollouts.show();
    eachChart((chart) => chart.resize());
    if (location.hash.slice(1).split("/")[0] !== name) history.replaceState(null, "", `#${name}`);
  }

  function onTabKey(event) {
    const names = Object.keys(panels);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    open(names[(names.indexOf(current) + by + names.length) % names.length]);
    panels[current].tab.focus();
  }

  function describe() {
    const runs = data.runs;
    const done = Math.max(...runs.map((run) => run.step ?? 0));
    const steps = runs[0].steps === null ? `${done} steps` : `step ${done} of ${runs[0].steps}`;
    const state = stateOf(data);
    const seeds = count(runs.length, runs.length > 1 && data.recipes.length === 1 ? "seed" : "run");
    const parts =
      data.recipes.length === 1 ? Object.entries(data.recipes[0].parts) : [["recipes", String(data.recipes.length)]];
    header.replaceChildren(
      el(
        "div",
        { class: "title" },
        el("h1", {}, plain(data.title)),
        el(
          "p",
          { class: "muted" },
          state && el("span", { class: state === "live" ? "live" : "state" }, state),
          plain(
            `${runs.length > 1 ? `${seeds} · ` : ""}${steps} · ${data.live ? "read" : "written"} ${new Date(data.written).toLocaleString()}`,
          ),
        ),
      ),
      el(
        "dl",
        { class: "facts" },
        parts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, plain(value)))),
      ),
      tabs,
    );
    for (const panel of Object.values(panels)) panel.tab.replaceChildren(panel.label());
  }

  function onKey(event) {
    const isTyping = event.target.closest?.("input, select, textarea");
    if (event.key === "Escape" && isTyping) event.target.blur();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") {
      event.preventDefault();
      open(current === "metrics" ? "metrics" : "rollouts");
      panels[current].box.querySelector(".search").focus();
    }
    const isInScroller = event.target.closest?.(".columns, .scroll, [role=tablist]");
    const by = { j: 1, k: -1, ...(isInScroller ? {} : { ArrowDown: 1, ArrowUp: -1 }) }[event.key];
    if (by && current === "rollouts") {
      event.preventDefault();
      rollouts.move(by);
    }
  }

  /** Ask for news, and draw again what they change; a page that cannot be reached says so. */
  async function poll() {
    try {
      const response = await fetch(`data.json?stamp=${data.stamp}`);
      const next = response.status === 200 ? await response.json() : null;
      header.classList.toggle("unreachable", !response.ok);
      if (next) {
        data = next;
        describe();
        made.clear();
        const top = scrollY;
        open(current);
        scrollTo(0, top);
      }
    } catch {
      header.classList.add("unreachable");
    }
    setTimeout(poll, POLL_MS);
  }

  describe();
  addEventListener("keydown", onKey);
  addEventListener("resize", () => rollouts.show());
  addEventListener("hashchange", () => panels[location.hash.slice(1)] && open(location.hash.slice(1)));
  open(panels[location.hash.slice(1)] ? location.hash.slice(1) : "overview");
  if (data.live) setTimeout(poll, POLL_MS);
  performance.mark("ready");
}

startReport();
