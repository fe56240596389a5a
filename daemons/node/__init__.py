"""What dlctl does on another machine when it is called over ssh: requests, and an answer to each.

    begin    place an agent, with the files that its daemons need
    look     say what is there
    end      end what is there, and remove it if that is wanted

and for `dlctl doctor`, which changes nothing there:

    hello    what time it is                listen   take connections of those who have a token
    examine  what there is                  reach    connect to others who listen

A machine that dlctl was never on has only these modules to answer with, so that they import little.
"""
