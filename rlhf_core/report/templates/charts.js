"use strict";
// Draws the charts of a page with BokehJS: one cursor and one range over all curves of an element. A click on a curve opens
// its nearest logged step; a click on a bar, the completions within it, where the page lists them.
const GREY = "#808080"; // legible on light and on dark
const COLOURS = ["#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"];

function inGrey(axis) {
  axis.major_label_text_color = axis.axis_label_text_color = GREY;
  Object.assign(axis, { axis_label_text_font_size: "11px", axis_label_standoff: 2 });
  axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = GREY;
  return axis;
}

function figure(title, more = {}) {
  const plot = Bokeh.Plotting.figure({
    title, height: 220, sizing_mode: "stretch_width", tools: "pan,box_zoom,wheel_zoom,reset", toolbar_location: null,
    background_fill_alpha: 0, border_fill_alpha: 0, outline_line_alpha: 0, ...more,
  });
  plot.toolbar.active_scroll = null;
  plot.title.text_color = GREY;
  for (const axis of [...plot.below, ...plot.left]) inGrey(axis);
  for (const grid of plot.center) if ("grid_line_alpha" in grid) grid.grid_line_alpha = 0.2;
  return plot;
}

// The axis on the right of curves whose scale is another one.
function addRight(plot, values, axis_label) {
  const low = Math.min(...values), high = Math.max(...values), rest = 0.05 * (high - low || 1);
  plot.extra_y_ranges = { right: new Bokeh.Range1d({ start: low - rest, end: high + rest }) };
  plot.add_layout(inGrey(new Bokeh.LinearAxis({ y_range_name: "right", axis_label })), "right");
}

const MARKS = { end: [COLOURS[2], "dashed"], resume: [COLOURS[4], "dashed"], checkpoint: [GREY, "dotted"] };

function curves({ title, lines, x: unit = "step" }, shared, marks, open) {
  const plot = figure(title, shared.range ? { x_range: shared.range } : {});
  shared.range = plot.x_range;
  plot.below[0].axis_label = unit;
  if (unit !== "minutes") { // there are no parts of a step
    const ticker = new Bokeh.BasicTicker({ min_interval: 1, num_minor_ticks: 0 });
    for (const part of [plot.below[0], ...plot.center.filter((each) => each.dimension === 0)]) part.ticker = ticker;
  }
  const onLeft = lines.filter((line) => !line.right), onRight = lines.filter((line) => line.right);
  if (onLeft.length === 1) plot.left[0].axis_label = onLeft[0].name;
  const right = onRight.flatMap((line) => line.y);
  if (right.length) addRight(plot, right, onRight.map((line) => line.name).join(", "));
  const left = [];
  lines.forEach(({ name, x, y, right }, index) => {
    const source = new Bokeh.ColumnDataSource({ data: { x, y, name: x.map(() => name) } });
    const line = { source, color: COLOURS[index], line_width: 1.5, ...(right ? { y_range_name: "right", line_dash: "dashed" } : {}) };
    const named = { ...line, legend_label: right ? `${name} (right)` : name };
    const glyphs = [plot.line({ field: "x" }, { field: "y" }, lines.length > 1 ? named : line)];
    const places = right ? { y_range_name: "right" } : {};
    if (x.length < 60) glyphs.push(plot.scatter({ field: "x" }, { field: "y" }, { source, color: COLOURS[index], size: 4, ...places }));
    if (!right) left.push(...glyphs);
  });
  if (right.length) plot.y_range.renderers = left;
  plot.add_tools(new Bokeh.HoverTool({ tooltips: [["", "@name"], [unit, "@x"], ["", "@y{0.[0000]}"]] }));
  plot.add_tools(new Bokeh.CrosshairTool({ overlay: shared.cursor }));
  for (const { step, kind } of marks) {
    const [line_color, line_dash] = MARKS[kind];
    plot.add_layout(new Bokeh.Span({ location: step, dimension: "height", line_color, line_dash, line_width: 1 }));
  }
  if (plot.legend) Object.assign(plot.legend, { label_text_font_size: "11px", spacing: 0, padding: 4, background_fill_alpha: 0, border_line_alpha: 0, label_text_color: GREY });
  if (open) plot.on_event("tap", (event) => open(Math.round(event.x)));
  return plot;
}

function histogram({ title, edges, counts }, open) {
  const plot = figure(title);
  plot.below[0].axis_label = title === "length" ? "tokens" : title;
  plot.left[0].axis_label = "completions";
  const source = new Bokeh.ColumnDataSource({ data: { low: edges.slice(0, -1), high: edges.slice(1), count: counts, none: counts.map(() => 0) } });
  plot.quad({ field: "low" }, { field: "high" }, { field: "none" }, { field: "count" }, { source, fill_color: COLOURS[0], line_color: GREY, line_width: 0.5 });
  plot.add_tools(new Bokeh.HoverTool({ tooltips: [["from", "@low"], ["to", "@high"], ["completions", "@count"]] }));
  if (open) plot.on_event("tap", (event) => {
    const bar = counts.findIndex((_, i) => edges[i] <= event.x && event.x <= edges[i + 1]);
    if (bar >= 0) open(new URLSearchParams({ histogram: title, low: edges[bar], high: edges[bar + 1] }));
  });
  return plot;
}

function draw(element) {
  const { charts, steps, marks, bars } = JSON.parse(element.dataset.charts);
  const nearest = (step) => steps.reduce((best, each) => (Math.abs(each[0] - step) < Math.abs(best[0] - step) ? each : best));
  const openStep = steps.length ? (step) => { location.href = nearest(step)[1]; } : null;
  const openBar = bars ? (query) => { location.search = query; } : null;
  const shared = { cursor: new Bokeh.Span({ dimension: "height", line_dash: "dotted", line_color: GREY }) };
  const page = new Bokeh.Document(); // one for all charts of the element, which share the cursor
  const cells = charts.map((chart) => {
    page.add_root(chart.edges ? histogram(chart, openBar) : curves(chart, shared, marks, openStep));
    const cell = element.appendChild(document.createElement("div"));
    cell.dataset.title = chart.title;
    return cell;
  });
  Bokeh.embed.add_document_standalone(page, element, cells);
}

// A page of many stages draws each one's charts when it comes into sight.
const inSight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting) {
    inSight.unobserve(target);
    draw(target);
  }
}, { rootMargin: "50%" });
for (const element of document.querySelectorAll(".charts")) inSight.observe(element);
