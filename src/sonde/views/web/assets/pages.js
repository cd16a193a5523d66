// All pages: where they are, what they are called, the key that leads there after `g`, and how a page gets filled.
export const PAGES = [
  { name: "runs", title: "Runs", key: "r", load: () => import("./pages/runs.js") },
  { name: "overview", title: "Overview", key: "o", ofRun: true, load: () => import("./pages/overview.js") },
  { name: "layers", title: "Layers", key: "l", ofRun: true, load: () => import("./pages/layers.js") },
  { name: "samples", fill: "scores of samples come from sonde train, or sonde eval with a metric", title: "Samples", key: "s", ofRun: true, load: () => import("./pages/samples.js") },
  { name: "sample", title: "Sample", ofRun: true, inBar: false, load: () => import("./pages/sample.js") },
  { name: "contrast", fill: "needs scores and captures: a config with a metric and a debugger", title: "Good against failed", key: "f", ofRun: true, load: () => import("./pages/contrast.js") },
  { name: "timeline", title: "Timeline", key: "t", ofRun: true, load: () => import("./pages/timeline.js") },
  { name: "logs", title: "Logs", key: "w", ofRun: true, load: () => import("./pages/logs.js") },
  { name: "tape", fill: "steps are taped by sonde.watch unless tape=False", title: "Tape", key: "a", ofRun: true, load: () => import("./pages/tape.js") },
  { name: "profile", fill: "times come with sonde.watch(loader=...) or a profiler trace in run/traces", title: "Profile", key: "p", ofRun: true, load: () => import("./pages/profile.js") },
  { name: "ranks", fill: "needs a training with several ranks", title: "Ranks", key: "k", ofRun: true, load: () => import("./pages/ranks.js") },
  { name: "compare", title: "Compare", key: "c", load: () => import("./pages/compare.js") },
];
