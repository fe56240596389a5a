"""The remote end of dlctl on another machine, called over ssh: requests, and an answer to each.

    begin    start an agent, with the files that its daemons need
    look     report what exists of a run
    end      end the daemons, and remove their files on request

and for `dlctl doctor`, which changes nothing:

    hello    report the time                listen   accept connections that send a token
    examine  report facts                   reach    connect to listeners

These modules import little, so that they also work on a machine where little is installed.
"""
