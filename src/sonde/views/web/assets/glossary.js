// What the words on the pages mean, shown when the pointer rests on one of them.
import { whenIdle } from "./dom.js";

const MEANINGS = {
  "loss": "What the training makes smaller; as it was logged.",
  "learning rate": "How large a step the optimizer takes along the gradient.",
  "gradient norm": "The length of the gradient of all parameters taken as one vector, before the optimizer uses it.",
  "update ratio": "How far the parameters moved in a step, divided by their size. About 0.001 is usual; 0.1 is a jump.",
  "smoothing": "Weight of earlier values in the smoothed line. It uses earlier steps only; 0 shows recorded values.",
  "rms": "Root mean square: the typical size of an element.",
  "norm": "The length of the tensor as one vector.",
  "max |x|": "The largest magnitude of an element.",
  "standard deviation": "How far elements lie from their mean.",
  "share of zeros": "The share of elements that are exactly 0.",
  "nan and infinite elements": "How many elements are not finite numbers.",
  "sites": "Places where something is measured: the weights, gradients, updates and outputs of each layer.",
  "quantity": "What is measured at a site: a parameter, its gradient, its update, an output.",
  "statistic": "Which number summarises the elements of a tensor.",
  "findings": "What the diagnosis holds to be wrong, with its evidence, and what would refute it.",
  "findings along the steps": "From where each finding held to where; a pale one was closed.",
  "refute": "What you would see if the finding were wrong.",
  "confidence": "How certain the diagnosis is.",
  "going": "Where the last values lead, against their own scatter.",
  "on disk": "What Sonde wrote into the folder of the run: readings, events, tapes, samples and captures. Files of your own, such as checkpoints, do not count.",
  "parameters": "Elements of all parameters of the model.",
  "latest events": "Spikes and jumps beyond the recent scatter, and what the program or the recording reported.",
  "a step's time": "The parts of a step: waiting for data, forward, backward, optimizer, and watching, which costs less in steps that are not recorded.",
  "gradient flow, first layer to last": "Gradients by depth: a line that falls towards the first layer vanishes, one that rises explodes.",
  "magnitudes": "A histogram for each step, by powers of two; zeros are left out.",
  "layers that differ": "Layers by how much they differ between the runs, against the scatter between repeats.",
  "where they diverge": "The first step and site at which two runs are no longer the same.",
  "score map": "A cell for each sample, coloured by its score.",
  "common failures": "Samples that are among the worst in several runs.",
  "map of samples": "Samples whose captured values are alike lie near each other. PCA keeps the two directions that vary most.",
  "confusion": "How often each label was predicted as each class.",
  "recall": "Of the samples of a class, the share that was predicted as it.",
  "precision": "Of the samples predicted as a class, the share that has its label.",
  "effect": "How often a failed sample has more of it than a good one, less how often it has less: -1 to 1, 0 is no difference.",
  "cohen's d": "The difference of means in standard deviations.",
  "p, corrected": "How often chance alone would separate the groups as well, corrected for the number of statistics tried.",
  "own time": "Time of a step that a rank spends itself, without waiting for other ranks.",
  "waits": "Time of a step that a rank waits for other ranks.",
};
const WORDS = "h2, th, dt, .tile > span, .field > span, .share > span:first-child, .lane-name";

/** Explain the words in a place, now and when it changes. */
export function explain(place) {
  let due = false;
  const look = () => {
    due = false;
    for (const each of place.querySelectorAll(WORDS)) {
      const text = each.textContent.replace(/[▴▾▲▼]/g, "").trim().toLowerCase();
      const meaning = MEANINGS[text] ?? MEANINGS[text.split(" of ")[0]];
      if (!meaning || each.title || each.closest("[title]")) continue;
      each.title = meaning;
      each.classList.add("explained");
    }
  };
  new MutationObserver(() => { if (!due) { due = true; whenIdle(look); } }).observe(place, { childList: true, subtree: true });
}
