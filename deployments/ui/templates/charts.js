"use strict";
// Draws the charts of a page with BokehJS: one cursor and one range over all curves. A click on a curve opens its nearest
// logged step; a click on a bar, the completions within it.
const GREY = "#808080"; // legible on light and on dark
const COLOURS = ["#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"];

function figure(title, more = {}) {
  const plot = Bokeh.Plotting.figure({
    title, height: 200, sizing_mode: "stretch_width", tools: "pan,box_zoom,wheel_zoom,reset", toolbar_location: null,
    background_fill_alpha: 0, border_fill_alpha: 0, outline_line_alpha: 0, ...more,
  });
  plot.toolbar.active_scroll = null;
  plot.title.text_color = GREY;
  for (const axis of [...plot.below, ...plot.left]) {
    axis.major_label_text_color = GREY;
    axis.axis_line_color = GREY;
  }
  for (const grid of plot.center) if ("grid_line_alpha" in grid) grid.grid_line_alpha = 0.2;
  return plot;
}

function curves({ title, lines }, shared, open) {
  const plot = figure(title, shared.range ? { x_range: shared.range } : {});
  shared.range = plot.x_range;
  lines.forEach(({ name, x, y }, index) => {
    const source = new Bokeh.ColumnDataSource({ data: { x, y, name: x.map(() => name) } });
    const line = { source, color: COLOURS[index], line_width: 1.5 };
    plot.line({ field: "x" }, { field: "y" }, lines.length > 1 ? { ...line, legend_label: name } : line);
    if (x.length < 60) plot.scatter({ field: "x" }, { field: "y" }, { source, color: COLOURS[index], size: 4 });
  });
  plot.add_tools(new Bokeh.HoverTool({ tooltips: [["", "@name"], ["step", "@x"], ["", "@y{0.[0000]}"]] }));
  plot.add_tools(new Bokeh.CrosshairTool({ overlay: shared.cursor }));
  if (plot.legend) Object.assign(plot.legend, { label_text_font_size: "11px", spacing: 0, padding: 4, background_fill_alpha: 0.5 });
  if (open) plot.on_event("tap", (event) => open(Math.round(event.x)));
  return plot;
}

function histogram({ title, edges, counts }, open) {
  const plot = figure(title);
  const source = new Bokeh.ColumnDataSource({ data: { low: edges.slice(0, -1), high: edges.slice(1), count: counts, none: counts.map(() => 0) } });
  plot.quad({ field: "low" }, { field: "high" }, { field: "none" }, { field: "count" }, { source, fill_color: COLOURS[0], line_color: GREY, line_width: 0.5 });
  plot.add_tools(new Bokeh.HoverTool({ tooltips: [["from", "@low"], ["to", "@high"], ["completions", "@count"]] }));
  plot.on_event("tap", (event) => {
    const bar = counts.findIndex((_, i) => edges[i] <= event.x && event.x <= edges[i + 1]);
    if (bar >= 0) open(new URLSearchParams({ histogram: title, low: edges[bar], high: edges[bar + 1] }));
  });
  return plot;
}

for (const element of document.querySelectorAll(".charts")) {
  const { charts, steps, here } = JSON.parse(element.dataset.charts);
  const nearest = (step) => steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
  const openStep = steps.length ? (step) => { location.href = `${here}/steps/${nearest(step)}`; } : null;
  const shared = { cursor: new Bokeh.Span({ dimension: "height", line_dash: "dotted", line_color: GREY }) };
  const page = new Bokeh.Document(); // one for all charts of the element, which share the cursor
  const cells = charts.map((chart) => {
    page.add_root(chart.edges ? histogram(chart, (query) => { location.search = query; }) : curves(chart, shared, openStep));
    const cell = element.appendChild(document.createElement("div"));
    cell.dataset.title = chart.title;
    return cell;
  });
  Bokeh.embed.add_document_standalone(page, element, cells);
}
