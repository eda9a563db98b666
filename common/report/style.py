"""Style sheet of the page, kept in code because the page is a single file."""

from __future__ import annotations

from common.report.canvas import COLOURS

DARK = {
    "paper": "#0e131b",
    "ink": "#e8edf5",
    "muted": "#9aa7b8",
    "line": "#2a3341",
    "target": "#ff6b76",
    "c0": "#6ea0ff",
    "c1": "#ffa14d",
    "c2": "#4cc795",
    "c3": "#b58bff",
    "c4": "#f57fb6",
    "c5": "#4fc3dc",
    "c6": "#d3a066",
    "c7": "#93a4c3",
}
"""Colours by name on a dark screen; the names are those of :data:`common.report.canvas.COLOURS`."""

RULES = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
main,header,footer{max-width:1240px;margin:0 auto;padding:0 24px}
header{padding-top:28px}
.eyebrow{margin:0;color:var(--muted);font-size:.92rem}
h1{margin:.1em 0 .5em;font-size:clamp(1.45rem,1rem + 2vw,2.1rem);line-height:1.2;letter-spacing:-.015em;
 overflow-wrap:anywhere}
h2{margin:0 0 12px;font-size:1.05rem;letter-spacing:-.005em}
.banner{margin:0 0 18px;padding:10px 16px;border-radius:10px;border:1px solid var(--target);color:var(--target);
 background:color-mix(in srgb,var(--target) 9%,transparent);font-weight:600}
.result{display:flex;flex-wrap:wrap;gap:18px 40px;align-items:flex-start;margin-bottom:18px}
.time{margin:0;font-size:clamp(2.5rem,1.8rem + 3.4vw,3.9rem);font-weight:680;line-height:1;letter-spacing:-.03em;
 font-variant-numeric:tabular-nums}
.time small{font-size:.36em;font-weight:500;letter-spacing:0;color:var(--muted);margin-left:.25em}
.said{margin:6px 0 0;color:var(--muted);font-size:.92rem;max-width:44em}
.chip{display:inline-block;padding:3px 12px;border-radius:99px;font-weight:600;font-size:.92rem;color:var(--tone);
 border:1px solid var(--tone);background:color-mix(in srgb,var(--tone) 10%,transparent)}
.good{--tone:var(--c2)}.plain{--tone:var(--c1)}.bad{--tone:var(--target)}
.reasons{margin:8px 0 0;padding-left:1.1em;color:var(--muted);font-size:.9rem;max-width:60em;overflow-wrap:anywhere}
.tiles{display:flex;flex-wrap:wrap;gap:1px;margin:0 0 20px;padding:0;
 border:1px solid var(--line);border-radius:12px;overflow:hidden;background:var(--card)}
.tiles div{flex:1 1 calc(100%/var(--columns) - 1px);box-shadow:0 0 0 1px var(--line);padding:12px 16px}
.tiles dt{color:var(--muted);font-size:.82rem}
.tiles dd{margin:2px 0 0;font-size:1.22rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tiles dd small{font-size:.68em;font-weight:500;color:var(--muted)}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;
 margin:0 0 20px;min-width:0}
.pictures{columns:2;column-gap:20px;margin-bottom:20px}
.pictures .card{break-inside:avoid;margin:0}
.pictures .card+.card{margin-top:20px}
.absent{margin:0;font-size:.9rem}.absent dt{font-weight:600}.absent dd{margin:0 0 8px;color:var(--muted)}
.picture svg{display:block;width:100%;height:auto}
svg text{font-family:inherit}
figure{margin:0}
figcaption,.note{color:var(--muted);font-size:.86rem;margin:8px 0 0;max-width:62em}
details{margin-top:8px;font-size:.88rem}
summary{cursor:pointer;color:var(--muted)}
.card>details:first-child{margin-top:0}
.scroll{overflow-x:auto;margin-top:6px}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
thead th{color:var(--muted);font-weight:500;white-space:nowrap}
tbody th{font-weight:600;overflow-wrap:break-word;min-width:7em}
td{overflow-wrap:break-word}
.path{display:inline-block;min-width:15em;overflow-wrap:anywhere}
.budget{display:grid;grid-template-columns:auto minmax(0,1fr);gap:10px 14px;align-items:center}
.budget .whose{font-size:.88rem;color:var(--muted);max-width:20em;overflow-wrap:anywhere}
.budget .whose b{color:var(--ink);margin-left:.5em;white-space:nowrap;font-variant-numeric:tabular-nums}
.bar{display:flex;height:38px;gap:2px}
.many .bar{height:20px}
.crowd{row-gap:3px}.crowd .bar{height:11px}.crowd .whose{font-size:.74rem;line-height:1.1}
.bar span{display:flex;align-items:center;justify-content:center;min-width:1px;overflow:hidden;white-space:nowrap;
 color:var(--paper);font-size:.84rem;font-weight:600;background:var(--tone)}
.bar span:last-child{border-radius:0 7px 7px 0}
.bar .init{background:repeating-linear-gradient(135deg,var(--line) 0 5px,transparent 5px 10px);color:var(--ink);
 border:1px solid var(--line);border-radius:7px 0 0 7px;margin-right:3px}
.hidden{height:7px;border-radius:4px}
.legend{display:flex;flex-wrap:wrap;gap:6px 22px;margin:14px 0 0;padding:0;list-style:none;font-size:.92rem}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;background:var(--tone);margin-right:7px}
.legend .init i{background:repeating-linear-gradient(135deg,var(--muted) 0 2px,transparent 2px 4px)}
.legend b{font-variant-numeric:tabular-nums}
.legend span{color:var(--muted)}
.switch{display:flex;justify-content:space-between;align-items:baseline;flex-wrap:wrap;gap:4px 16px}
.radios{display:flex;border:1px solid var(--line);border-radius:8px;overflow:hidden;font-size:.84rem;margin-bottom:8px}
.radios label{padding:3px 12px;cursor:pointer;color:var(--muted)}
.radios input{position:absolute;opacity:0}
.radios label:has(:checked){background:color-mix(in srgb,var(--c0) 16%,transparent);color:var(--ink)}
.radios label:has(:focus-visible){outline:2px solid var(--c0);outline-offset:-2px}
.over-progress{display:none}
.card:has(.by-progress:checked) .over-progress{display:block}
.card:has(.by-progress:checked) .over-time{display:none}
footer{padding-bottom:36px;color:var(--muted);font-size:.84rem}
@media (max-width:820px){.pictures{columns:1}.tiles div{flex-basis:calc(100%/3 - 1px)}
 main,header,footer{padding-left:14px;padding-right:14px}
 .card{padding:14px}.budget{grid-template-columns:minmax(0,1fr);gap:4px}.budget .bar{margin-bottom:8px}}
@media (max-width:560px){.tiles div{flex-basis:calc(50% - 1px)}}
@media print{.card{break-inside:avoid}}
"""


def style_sheet() -> str:
    """Return the whole style sheet, with the colours of light and dark screens."""
    light = _variables(COLOURS, card="#ffffff")
    dark = _variables(DARK, card="#151c27")
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{RULES}"


def _variables(colours: dict[str, str], card: str) -> str:
    return "".join(f"--{name}:{value};" for name, value in {**colours, "card": card}.items())
