"""See a run: one record of all there is to see, one function that draws it, two who show it.

snapshot.py   the record, and the file it travels in: status.json of the run directory
observer.py   from a loop that runs to snapshots                                       [C]
lines.py      what past steps say
files.py      from a run directory alone to snapshots
plots.py      curves, bars and strips out of letters
parts.py      the panels: devices, curves, figures, a sample, notes
frame.py      snapshot, width, height, time → a frame of exactly that size
screen.py     the terminal: taken over, read, and given back whatever happens
live.py       the reporter's thread: looks, writes status.json, draws, hears keys      [C]
watch.py      `minirl watch`: the same picture from files
"""
