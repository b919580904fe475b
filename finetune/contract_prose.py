"""The prose around the answers: parties, openings, clauses without an answer, and how a clause is marked superseded."""

# Who the two parties are to each other.
ROLES = (
    ("the Supplier", "the Customer"),
    ("the Landlord", "the Tenant"),
    ("the Lender", "the Borrower"),
    ("the Licensor", "the Licensee"),
    ("the Contractor", "the Client"),
    ("the Carrier", "the Shipper"),
)

TITLES = ("Framework Agreement", "Service Agreement", "General Agreement", "Master Agreement", "Cooperation Agreement")

OPENINGS = (
    "This agreement is made on {date} between {first_name} ({first}) and {second_name} ({second}).",
    "On {date} {first_name}, called {first} below, and {second_name}, called {second} below, agree as follows.",
    "The parties to this agreement of {date} are {first_name}, hereinafter {first}, and {second_name}, hereinafter "
    "{second}.",
)

# A clause that no longer counts says so itself. `{clause}` is the clause as it was written.
SUPERSEDED = (
    "As it stood before the amendment of {date}, this clause read: {clause} That text no longer applies.",
    "Superseded on {date}. The former text was: {clause}",
    "The following was struck out on {date} and has no effect: {clause}",
    "A draft of {date}, which was never signed, had foreseen: {clause} The parties dropped it.",
    "Repealed. Until {date} the parties had agreed: {clause} This is kept for the record only.",
)

# What may follow the sentence that carries the answer.
TAILS = (
    "This holds for every annex as well.",
    "Nothing else was agreed on this point.",
    "Changes to this clause are made in writing.",
    "Both parties have discussed this clause at length.",
    "The annexes may add details but no exceptions.",
    "This applies from the first day of the term.",
    "Mandatory provisions of law are not affected.",
)

# (heading, text) of clauses without any answer.
FILLERS = (
    (
        "Definitions",
        "Words in capitals have the meaning given to them in the first annex, in the singular and in the plural alike.",
    ),
    (
        "Entire agreement",
        "This document contains all that the parties have agreed. Earlier letters and talks have no bearing on it.",
    ),
    (
        "Severability",
        "Should one provision turn out to be void, the others remain in force, and the parties replace it "
        "by what comes closest to its purpose.",
    ),
    (
        "Assignment",
        "{party} may transfer its rights to an affiliated company once {other} has consented, and consent "
        "shall not be withheld without good reason.",
    ),
    (
        "Force majeure",
        "Neither party answers for what neither could foresee nor prevent, such as floods, strikes or acts "
        "of government, as long as it lasts.",
    ),
    (
        "Good faith",
        "{party} and {other} deal with each other fairly and tell each other early of whatever might stand in "
        "the way of the common goal.",
    ),
    (
        "Language",
        "The English text of this agreement prevails over any translation that may have been made for the "
        "convenience of {party}.",
    ),
    ("Headings", "Headings are there to help the reader and do not change how a clause is to be understood."),
    (
        "Waiver",
        "If {party} does not insist on a right at once, the right is not lost, and a waiver in one case is none "
        "in the next.",
    ),
    (
        "Subcontractors",
        "{party} may employ subcontractors, provided that they are skilled and that {other} knows their "
        "names before they begin.",
    ),
    (
        "Intellectual property",
        "Drawings, models and software stay with the party that made them, while {party} may use "
        "them as far as the work requires it.",
    ),
    (
        "Training",
        "{party} instructs the staff of {other} in the use of the equipment and hands over the manuals "
        "belonging to it.",
    ),
    (
        "Safety",
        "On the premises of {other} the staff of {party} obey the house rules and wear the protective clothing "
        "that is handed to them.",
    ),
    (
        "Environment",
        "{party} avoids waste where it can, returns packaging to {other}, and reports any spill to the "
        "authorities without delay.",
    ),
    (
        "Taxes",
        "Each party bears the taxes that the law lays upon it, and {party} hands over the certificates needed for "
        "an exemption.",
    ),
    (
        "Reports",
        "{party} prepares a short report on the state of the work each quarter and discusses it with {other} in "
        "a meeting.",
    ),
    (
        "Steering committee",
        "A committee with members from both parties meets as needed, keeps minutes, and settles what "
        "the project leaders cannot settle.",
    ),
    (
        "Publicity",
        "{party} asks {other} before it mentions the cooperation in an advertisement, on a website or in a "
        "press release.",
    ),
    (
        "Tools",
        "Tools lent by {other} are marked, kept in good order by {party}, and returned clean when they are no "
        "longer needed.",
    ),
    ("Counterparts", "This agreement is signed in two copies of equal standing, one for {party} and one for {other}."),
    (
        "Survival",
        "Provisions that by their nature reach beyond the end of this agreement stay in force after it has ended.",
    ),
    (
        "Costs",
        "Each party bears the costs of its own advisers, whether or not the plans described in the annex are "
        "carried out.",
    ),
    (
        "Quality",
        "{party} runs a quality system that follows the recognised standards of its trade and lets {other} look "
        "into it.",
    ),
    (
        "Staff",
        "{party} chooses the people who do the work with care and replaces anyone whom {other} has good reason to "
        "refuse.",
    ),
)

SUMMARY_OPENING = "{first_name} ({first}) and {second_name} ({second}) are bound by this contract."
