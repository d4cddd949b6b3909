"use strict";
(() => {
  const root = document.documentElement;

  // Figures name colours as CSS variables, so that one description serves light and dark.
  function resolved(value) {
    if (Array.isArray(value)) return value.map(resolved);
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolved(inner)]));
    }
    const name = typeof value === "string" && value.match(/^var\((--[a-z-]+)\)$/);
    return name ? getComputedStyle(root).getPropertyValue(name[1]).trim() : value;
  }

  function draw(figures) {
    for (const [key, figure] of Object.entries(figures)) {
      const place = document.getElementById("plot-" + key);
      const { data, layout } = resolved(figure);
      // A finger on a plot means to scroll past it.
      if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
      layout.font.family = getComputedStyle(document.body).fontFamily;
      Plotly.react(place, data, layout, { displayModeBar: false, responsive: true });
    }
  }

  function offerCopy(block) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const code = block.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        // No permission, as in some viewers of local files: select it, so that one keystroke copies.
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.append(button);
  }

  document.querySelectorAll(".type-this").forEach(offerCopy);
  const held = document.getElementById("figures");
  if (held) {
    const figures = JSON.parse(held.textContent);
    draw(figures);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(figures));
  }
})();
