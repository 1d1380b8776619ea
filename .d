/tmp/tmp.lTOtqd7MOk
