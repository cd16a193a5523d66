// Draws every figure of the page in the theme of the reader, and again when the theme is switched.
(() => {
  const { figures, templates } = JSON.parse(document.getElementById("figures").textContent);
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const theme = () => chosen ?? (prefersDark.matches ? "dark" : "light");
  const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

  async function draw() {
    document.documentElement.dataset.theme = theme();
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = figures[Number(place.dataset.figure)];
      const layout = { ...figure.layout, template: templates[theme()], autosize: true };
      delete layout.width;
      try {
        await Plotly.react(place, figure.data, layout, options);
        place.dataset.drawn = "true";
      } catch (error) { // one figure that cannot be drawn must not keep the others from the reader
        console.error(error);
        place.textContent = `This figure could not be drawn: ${error.message ?? error}`;
      }
    }
    document.documentElement.dataset.ready = "true";
  }

  document.getElementById("theme").addEventListener("click", () => {
    chosen = theme() === "dark" ? "light" : "dark";
    draw();
  });
  prefersDark.addEventListener("change", draw);
  draw();
})();
