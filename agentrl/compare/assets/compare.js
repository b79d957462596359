"use strict";
/* A comparison: what comes of it first, then curves, then the tables. */
{
  const { words, comparisons } = pageData((_, value) => (typeof value === "string" ? plain(value) : value));
  const page = document.getElementById("page");
  const columns = (names) => names.map((name, index) => ({ name, numeric: index > 0 }));
  page.append(el("h1", {}, "Comparison"));
  if (words) page.append(el("p", {}, words));
  comparisons.forEach((comparison, number) => {
    const { metric, panel, num_tasks, curves, levels, differences, verdicts, notes } = comparison;
    const tasks = panel ? `, ${num_tasks} tasks (panel ${panel})` : "";
    page.append(
      el("h2", {}, (number ? "On fresh seeds: " : "") + metric + tasks),
      el("ul", {}, verdicts.map((verdict) => el("li", {}, verdict))),
      legendOf(curves),
      lineChart({ title: metric, note: "mean with its 95 % interval; thin: seeds", curves, height: 300 }),
      table("Means over seeds, with 95 % intervals", columns(levels.columns), levels.rows),
    );
    if (differences.rows.length)
      page.append(
        table("Differences, paired by seed, with 95 % intervals", columns(differences.columns), differences.rows),
      );
    if (notes.length)
      page.append(el("h3", {}, "Before you believe it"), el("ul", {}, notes.map((note) => el("li", {}, note))));
  });
}
