"use strict";
// The strips of tokens: each trained token is coloured by the chosen value, and shows all of its values when it is pointed at.
function tokensOf(strip) {
  const columns = Object.entries(JSON.parse(strip.dataset.tokens));
  const count = columns.length ? columns[0][1].length : 0;
  return Array.from({ length: count }, (_, i) => Object.fromEntries(columns.map(([name, values]) => [name, values[i]]).filter(([, value]) => value !== null)));
}

function valueOf(token, name) {
  if (name !== "ratio") return token[name];
  return "trainer" in token && "engine" in token ? Math.exp(token.trainer - token.engine) : undefined;
}

function describe(token) {
  const names = ["advantage", "engine", "trainer", "ratio", "entropy", "reference", "value", "step reward"];
  const known = names.map((name) => [name, valueOf(token, name)]).filter(([, value]) => value !== undefined);
  return [`token ${token.id}`, ...known.map(([name, value]) => `${name} ${Number(value).toPrecision(4)}`)].join(", ");
}

// From the least to the largest value that any token has: blue is low, and red is high; advantages and ratios have a middle.
function scale(strips, name) {
  const middle = { advantage: 0, ratio: 1 }[name];
  const values = strips.flatMap(([, tokens]) => tokens.map((token) => valueOf(token, name)).filter((v) => v !== undefined));
  const least = values.reduce((least, value) => Math.min(least, value), 0), most = values.reduce((most, value) => Math.max(most, value), 0);
  const centre = middle ?? (least + most) / 2;
  const reach = values.reduce((most, value) => Math.max(most, Math.abs(value - centre)), 1e-12);
  return (value) => {
    const share = (value - centre) / reach;
    return `rgb(${share > 0 ? "220 60 50" : "50 100 230"} / ${0.75 * Math.min(1, Math.abs(share))})`;
  };
}

function show(completion) {
  const colour = completion.querySelector("select");
  const status = completion.querySelector("[role=status]");
  const strips = [...completion.querySelectorAll(".tokens")].map((strip) => [strip, tokensOf(strip)]);
  const draw = () => {
    const shade = scale(strips, colour.value);
    for (const [strip, tokens] of strips) {
      strip.replaceChildren(...tokens.map((token) => {
        const span = document.createElement("span");
        span.textContent = token.text.replaceAll("\n", "⏎\n");
        span.title = describe(token);
        if (!("engine" in token)) span.className = "untrained";
        else span.tabIndex = 0;
        const value = valueOf(token, colour.value);
        if (value !== undefined) span.style.backgroundColor = shade(value);
        for (const event of ["mouseenter", "focus"]) span.addEventListener(event, () => { status.textContent = describe(token); });
        return span;
      }));
    }
  };
  colour.addEventListener("change", draw);
  draw();
}

// In a page of many completions, the tokens of each are drawn when it is opened.
for (const completion of document.querySelectorAll(".completion")) {
  const folded = completion.closest("details:not([open])");
  if (folded) folded.addEventListener("toggle", () => show(completion), { once: true });
  else show(completion);
}
