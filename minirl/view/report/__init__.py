"""What people look at when a run is over, or elsewhere: from the run directory's files alone.

    rundir      reads a run directory, whole or torn
    families    runs that differ only in their seed are one curve with a band
    charts      which curves there are; svg and png draw them
    timeline    what each device did, as a picture
    page        all of it as one HTML file that needs no network
    tables      minirl runs, inspect and diff

Leaves out: everything that needs a model, a GPU or the run's own processes.
"""
