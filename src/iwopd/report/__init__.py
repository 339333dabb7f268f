"""The report: run directories and probes in, one self-contained HTML page (or figures for print) out.

reading      runs (`iwopd.runs`), probes (`probe_files`) and the hand-off curve, with notes on what is missing
gathering    repeats of one method become one group: one label and one style everywhere
charts       a chart as data; drawn by `assets/charts.js` on the page and by `paper` with matplotlib
series       from runs to series; `probes` does it for probes
panels/      one module per section of the page: its charts, its words
headline     the finding, who learned and who wins, in words
token_columns  rollouts, token by token, in few bytes
paper        the charts with matplotlib; `sheets` arranges them as the paper does, `reproduction` draws `iwopd reproduce`
page         templates, content-security policy, the file
watch        the same again while a run goes on
"""

from iwopd.report.page import write_report
from iwopd.report.reading import ReportError

__all__ = ["ReportError", "write_report"]
