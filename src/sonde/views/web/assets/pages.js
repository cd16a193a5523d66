// All pages: where they are, what they are called, and the key that leads there after `g`.
export const PAGES = [
  { name: "runs", title: "Runs", key: "r", load: () => import("./pages/runs.js") },
  { name: "overview", title: "Overview", key: "o", ofRun: true, load: () => import("./pages/overview.js") },
];
