// All pages: where they are, what they are called, and the key that leads there after `g`.
export const PAGES = [
  { name: "runs", title: "Runs", key: "r", load: () => import("./pages/runs.js") },
  { name: "overview", title: "Overview", key: "o", ofRun: true, load: () => import("./pages/overview.js") },
  { name: "layers", title: "Layers", key: "l", ofRun: true, load: () => import("./pages/layers.js") },
  { name: "samples", title: "Samples", key: "s", ofRun: true, load: () => import("./pages/samples.js") },
  { name: "sample", title: "Sample", ofRun: true, inBar: false, load: () => import("./pages/sample.js") },
  { name: "contrast", title: "Good against failed", key: "f", ofRun: true, load: () => import("./pages/contrast.js") },
  { name: "timeline", title: "Timeline", key: "t", ofRun: true, load: () => import("./pages/timeline.js") },
  { name: "profile", title: "Profile", key: "p", ofRun: true, load: () => import("./pages/profile.js") },
  { name: "compare", title: "Compare", key: "c", load: () => import("./pages/compare.js") },
];
