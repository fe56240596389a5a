"""What dlctl does on another machine when it is called over ssh: one request, one answer, an end.

    begin    place an agent, with the files that its daemons need
    look     say what is there
    end      end what is there, and remove it if that is wanted

A machine that dlctl was never on has only these modules to answer with, so that they import little.
"""
