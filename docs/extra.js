// A link to something folded opens what it is folded in; on paper everything is open.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (target) target.scrollIntoView();
};
addEventListener("hashchange", unfold);
addEventListener("DOMContentLoaded", unfold);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
// The theme leaves these without names, which readers of the screen need.
addEventListener("DOMContentLoaded", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((bar, place) => bar.setAttribute("aria-label", `Code ${place + 1}`));
});
// Code and tables that scroll sideways can be scrolled with the keyboard.
addEventListener("DOMContentLoaded", () => document.querySelectorAll("pre > code, .md-typeset__scrollwrap, div.formula").forEach(box => { box.tabIndex = 0; }));
