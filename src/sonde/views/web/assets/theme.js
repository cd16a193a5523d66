// Light or dark: as the reader chose, else as the system says.
const asked = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

function stored() {
  try {
    return localStorage.getItem("sonde-theme"); // not to be had inside some frames
  } catch {
    return null;
  }
}

let chosen = stored();

export const theme = () => (chosen === "dark" || chosen === "light" ? chosen : asked.matches ? "dark" : "light");

/** Call a function whenever the theme changes; returns what undoes it. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function apply() {
  document.documentElement.dataset.theme = theme();
  for (const listener of listeners) listener(theme());
}

export function switchTheme() {
  chosen = theme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("sonde-theme", chosen);
  } catch {
    // it lasts as long as the page then
  }
  apply();
}

asked.addEventListener("change", apply);
apply();
